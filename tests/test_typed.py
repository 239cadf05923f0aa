"""What the pages tell a reader to type, typed: each command of each page runs to its end, on what is small or near.

The pages of the guide are played in order, with their files, in `test_guide.py`. Here each command stands alone in a
folder that has what the pages speak of. Training and studies are planned (`--dry-run`), by Slurm too; evaluations ask
a very small model few questions; the hub and the server are this machine's.
"""

import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from benchmark_layouts import asked_in_text, verl
from conftest import SMALL_RUN
from fake_slurm import install
from local_hub import TOKEN, LocalHub, Repository, local_hub, talk_to
from openai_server import Server
from question_sources import text_of, write

from exgrpo_cli.commands import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    # The hub's client hands large files to its transport in a way that the transport's next version will not take.
    pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning"),
]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PLAYED = {
    "tutorial.md", "your-data.md", "your-model.md", "your-reward.md", "reading-a-run.md", "a-study-of-your-own.md",
}  # fmt: skip
"""Pages of `test_guide.py`."""
PAGES = [page for page in [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"] if page.name not in PLAYED]
MATH, CHOICE = ("aime", "aime25", "amc", "math", "minerva", "olympiad_bench"), ("arc-c", "gpqa", "mmlu_pro")
ELSEWHERE = {
    "/shared/runs/first": "shared/runs/first",
    "aime24,math500": "benchmarks.parquet",
    "qwen-math-1.5b": "models/Qwen2.5-Math-1.5B",
    "Qwen/Qwen2.5-Math-1.5B": "models/Qwen2.5-Math-1.5B",
    "rzzhan/ExGRPO-Qwen2.5-Math-1.5B-Zero": "models/ExGRPO-Qwen2.5-Math-1.5B-Zero",
}
"""Values of the pages and what stands for them here; models only where one is asked."""


def commands(page: Path) -> list[str]:
    """The `exgrpo` commands of a page's shell blocks, without comments and what the shell does with the output."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    typed = [line for line in lines if line.startswith(("exgrpo ", ".venv/bin/exgrpo "))]
    return [re.sub(r"\s+#.*| > \S+( +#.*)?$", "", line) for line in typed if "$(" not in line]


def block(page: str, language: str) -> str:
    """The first block of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)[0]


def questions(*sources: str) -> list[dict]:
    """Two questions of each benchmark in the layout of verl."""
    math = [verl(name)(f"{name} {n}+{n}=?", str(2 * n)) for name in sources if name in MATH for n in (1, 2)]
    options = [asked_in_text(name, "{}. {}", "") for name in sources if name in CHOICE]
    texts = ("oak", "elm", "ash", "fir")
    return math + [ask(f"{n}; which tree?", texts, n) for ask in options for n in (1, 2)]


def fill(hub: LocalHub, backbone: Path) -> None:
    """Everything that the pages take from the hub."""
    files = {file.name: file.read_bytes() for file in backbone.iterdir()}
    for preset in (ROOT / "presets/backbones").glob("*.toml"):
        source = tomllib.loads(preset.read_text())["backbone"]["source"]
        hub.repositories["model", source] = Repository(files=files, large={"model.safetensors"})
    rows = [{"question": f"{n}+{n}=?", "answer": f"{n}+{n}\n#### {2 * n}"} for n in range(1, 9)]
    configurations = ("main", "socratic")
    parts = [f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in configurations]
    files = {f"{name}/train.jsonl": text_of(".jsonl", *rows).encode() for name in configurations}
    files["README.md"] = f"---\nconfigs:\n{''.join(parts)}---\n".encode()
    hub.repositories["dataset", "openai/gsm8k"] = Repository(files=files)
    rows = [verl("openr1", system=True)(f"{n}+{n}=?", str(2 * n)) for n in range(1, 9)]
    files = {"train.jsonl": text_of(".jsonl", *rows).encode()}
    hub.repositories["dataset", "Elliott/Openr1-Math-46k-8192"] = Repository(files=files)


def furnish(folder: Path, backbone: Path) -> None:
    """The files, runs and studies that the pages speak of, by the names that they have there."""
    (folder / "docs").symlink_to(DOCS)
    for name in ("Qwen2.5-Math-1.5B", "ExGRPO-Qwen2.5-Math-1.5B-Zero"):
        shutil.copytree(backbone, folder / "models" / name)
    settings = [
        part for each in (*SMALL_RUN, "validation.every=3", f"backbone.source={backbone}") for part in ("--set", each)
    ]
    assert run(["train", "--output", "runs/exgrpo-tiny", "--quiet", *settings]) == 0
    for name in ("runs/mine", "runs/first", "studies/metric/ent-min/seed-0", "studies/metric/random/seed-0"):
        shutil.copytree("runs/exgrpo-tiny", name)
    judged = ["ablate", "--claim", "replay-beats-on-policy", "--results", "docs/results", "--quiet"]
    assert run([*judged, "--output", "studies/claims"]) == 0
    assert (
        run(["ablate", "--metric", "ent", "--seeds", "1", "--output", "studies/metric-ent", "--quiet", *settings]) == 0
    )
    (folder / "from-elsewhere").symlink_to(DOCS)
    shutil.copy(ROOT / "presets/claims/replay-beats-on-policy.toml", "mine.toml")
    Path("cluster.toml").write_text(block("cluster.md", "toml"))
    Path("forgets.toml").write_text(block("custom-replay.md", "toml"))
    Path("my_replay.py").write_text(block("custom-replay.md", "python"))
    write(folder / "benchmarks.parquet", *questions(*MATH, *CHOICE))
    for name in ("before", "after", "base", "grpo", "exgrpo"):
        asked = ["evaluate", "aime24", "--data", "benchmarks.parquet", "--model", "runs/mine", "--max-tokens", "8"]
        assert run([*asked, "--samples", "2", "--output", f"kept/aime24-{name}", "--quiet"]) == 0
    rows = [{"question": f"{n}+{n}=?", "answer": str(2 * n)} for n in range(1, 41)]
    write(folder / "questions.jsonl", *rows)
    write(folder / "train.parquet", *rows)
    write(folder / "questions.csv", *({"text": row["question"], "gold": f"answer: {row['answer']}"} for row in rows))
    assert run(["prepare", "questions.jsonl", "--output", "data/mine.parquet", "--quiet"]) == 0
    experience = [{"question": row["question"], "text": "so \\boxed{2}", "reward": 1.0} for row in rows[:4]]
    write(folder / "rollouts.jsonl", *experience)


@pytest.fixture(scope="module")
def workplace(small_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder that the commands are typed in, and the address of a server of models."""
    folder = tmp_path_factory.mktemp("typed")

    def answer(path: str, body: dict, before: int) -> tuple[int, dict]:
        choice = {"message": {"content": "\\boxed{2}"}, "finish_reason": "stop"}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 4}}

    with pytest.MonkeyPatch.context() as patch, chdir(folder), local_hub() as hub:
        install(folder / "slurm")
        patch.setenv("PATH", str(folder / "slurm"), prepend=":")
        patch.setenv("HF_TOKEN", TOKEN)
        patch.setenv("EXGRPO_CACHE", str(folder / "cache"))
        patch.syspath_prepend(str(folder))
        talk_to(hub.endpoint, folder / "hub", patch)
        fill(hub, small_backbone)
        furnish(folder, small_backbone)
        server = Server(answer, lambda *_: (200, {"data": [{"id": "my-model"}]}))
        yield folder, server.url
        server.close()


def short(arguments: list[str], url: str) -> list[str]:
    """The command as it is run here."""
    name, *rest = ["hf" if each == "vllm" else each for each in arguments]
    if name in ("train", "ablate"):
        rest = [ELSEWHERE.get(each, each) if each.startswith("/") else each for each in rest]
        return [name, *rest, *(["--dry-run"] if "--dry-run" not in rest else [])]
    if name == "replay-stats":
        [known] = pq.read_table("runs/exgrpo-tiny/data/train.parquet")["id"][:1].to_pylist()
        # Names of functions are longer than a figure's legend holds.
        drawn = ["--no-plots"] if "python:" in " ".join(rest) else []
        return [name, *({"80": "4", "5f3a": known}.get(each, each) for each in rest), *drawn]
    if name == "prepare":
        return [name, *({"aime24,math500": ELSEWHERE["aime24,math500"]}.get(each, each) for each in rest)]
    if name != "evaluate":
        return arguments
    rest = [found for each in rest for found in (map(str, sorted(Path().glob(each))) if "*" in each else [each])]
    rest = [ELSEWHERE.get(each, url if each.startswith("http") else each) for each in rest]
    if "--compare" in rest:
        return [name, *rest]
    asked = ["--max-tokens", "8", *(["--data", "benchmarks.parquet"] if rest[0] != "arithmetic" else [])]
    return [name, *rest, *asked]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_what_a_page_types_runs(page: Path, workplace: tuple[Path, str]) -> None:
    shutil.rmtree("results", ignore_errors=True)
    shutil.copytree("kept", "results")
    for line in commands(page):
        arguments = short(shlex.split(line)[1:], workplace[1])
        assert run(arguments) == 0, (line, arguments)
