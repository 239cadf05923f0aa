"""Files of somebody else's that would run code here, drawn from generators: none may, asked or unasked.

    python benchmarks/campaign/foreign_code.py --count 55 --seed 1

A route is a kind of file, a key or table in it, a form of writing, and a command that reads it. Whatever runs makes the
file `was-here`. Each is run with nothing on its standard input, or with a `yes` to every question. Its class:

refused  exit code 2, and a line
inert    the command did what it was asked, and ran nothing of the file's
stopped  still at work after its time, nothing run
late     exit code 1, and a line, nothing run
ugly     a traceback, "unexpected", a signal, no line at all; nothing run
run      foreign code ran
"""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from command_lines import build
from processes import Finding, campaign, exgrpo, fresh_copy, parser_of, trials_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
import fake_slurm

from exgrpo_cli.base.files import write_manifest

BAD = ("ugly", "run")
MARKER = "was-here"
KEYS = ("grading.grader", "replay.metric", "replay.sampler", "replay.priority")
CLAIM = """[about]
title = "t"
source = "s"
[claim]
regime = "{regime}"
run_minutes = 5.0
settings = {all_arms}
[arms.mine]
method = "{method}"
settings = {arm}
[[contrast]]
arm = "{first}"
control = "{second}"
smallest_effect = 0.04
spread = 0.035
"""
Lines = list[list[str]]


class Pickled:
    """A pickle that makes the marker when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mknod, (str(self.marker),)


def _key(rng: random.Random) -> tuple[str, str, str]:
    """A section, a key of it that takes a function, and what else the section needs to say."""
    section, key = rng.choice(KEYS).split(".")
    return section, key, "composition = 'append'\n" if key == "priority" else ""


def _function(rng: random.Random) -> str:
    return rng.choice(("python:evil:f",) * 4 + ("python:evil.sub:f", "python:package:f", "python:package.evil:f"))


def _table(rng: random.Random, prefix: str = "") -> str:
    """TOML that names a function, written in one of its ways."""
    (section, key, more), value = _key(rng), _function(rng)
    inner = more.strip().replace("\n", ", ")
    inline = f"{prefix}{section} = {{{inner + ', ' if inner else ''}{key} = '{value}'}}\n"
    dotted = f"{prefix}{section}.{key} = '{value}'\n"
    dotted += f"{prefix}{section}.{more}" if more else ""
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in value)
    return rng.choice(
        (
            f"[{prefix}{section}]\n{more}{key} = '{value}'\n",
            f'[{prefix}{section}]\n{more}"{key}" = "{escaped}"\n',
            f"\ufeff[{prefix}{section}]\n{more}{key} = '''{value}'''\n",
            inline if not prefix else f"[{prefix}{section}]\n{more}{key} = '{value}'\n",
            dotted,
        )
    )


def _assignments(rng: random.Random) -> str:
    """A claim's settings that name a function."""
    (section, key, more), value = _key(rng), _function(rng)
    first = ['"replay.composition=append"'] if more else []
    form = rng.choice(("{}={}", "{} = {}", "{}='{}'", " {}={} "))
    seeded = value.replace("evil", "evil{seed}") if rng.random() < 0.2 else value
    hidden = f'"run.threads=1\\n{section}.{key}={value}"'
    plain = json.dumps(form.format(f"{section}.{key}", seeded))
    return f"[{', '.join([*first, hidden if rng.random() < 0.15 else plain])}]"


def config(rng: random.Random, folder: Path) -> Lines:
    """A file of settings."""
    (folder / "theirs.toml").write_text(_table(rng))
    command = rng.choice((["train"], ["ablate", "--metric", "ent"], ["prepare"], ["ablate", "--vary", "replay.mu=0.5"]))
    return [[*command, "--config", "theirs.toml", *rng.choice(([], ["--dry-run"])), "--output", "out"]]


def method(rng: random.Random, folder: Path) -> Lines:
    """A method's file, or the `[published]` of one."""
    published = rng.random() < 0.5
    text = "[objective]\nclip_high = 0.3\n" + _table(rng, "published.") if published else _table(rng)
    (folder / "theirs.toml").write_text(text)
    as_published = ["--as-published"] if published else []
    train = ["train", "--method", "theirs.toml", *as_published]
    command = rng.choice((train, train, ["ablate", "--methods", "grpo,theirs.toml"]))
    return [[*command, "--dry-run", "--output", "out"]]


def claim(rng: random.Random, folder: Path) -> Lines:
    """A claim's settings, those of an arm, or a method's file that an arm names."""
    (folder / "m.toml").write_text(_table(rng))
    where = rng.choice(("all", "arm", "method"))
    text = CLAIM.format(
        regime=rng.choice(("", "hard-tail")),
        all_arms=_assignments(rng) if where == "all" else "[]",
        arm=_assignments(rng) if where == "arm" else '["replay.start_threshold=0"]',
        method="m.toml" if where == "method" else "exgrpo",
        first=rng.choice(("exgrpo", "grpo")),
        second="mine",
    )
    (folder / "theirs.toml").write_text(text)
    return [["ablate", "--claim", "theirs.toml", "--dry-run", "--output", "out"]]


def run_folder(rng: random.Random, folder: Path) -> Lines:
    """The configuration of a run, read by every command that takes one."""
    file = folder / "run" / "config.toml"
    (section, key, more), value = _key(rng), _function(rng)
    lines = [line for line in file.read_text().splitlines() if not line.startswith(f"{key} = ")]
    lines.insert(lines.index(f"[{section}]") + 1, f"{key} = '{value}'")
    if more:
        lines = [line if not line.startswith("composition = ") else more.strip() for line in lines]
    file.write_text("\n".join(lines) + "\n")
    what_if = rng.choice(("direction=max", "mu=0.4", "sigma=0.3", "sampler=linear", "metric=ppl"))
    return [
        rng.choice(
            (
                ["train", "--resume", "--output", "run", "--steps", "5"],
                ["train", "--resume", "--output", "run", "--dry-run"],
                ["train", "--config", "run/config.toml", "--dry-run", "--output", "out"],
                ["replay-stats", "run", "--what-if", what_if],
                ["replay-stats", "run", "--json"],
                ["report", "run", "--output", "page.html"],
                ["evaluate", "arithmetic", "--data", "q-heldout.parquet", "--model", "run", "--output", "out"],
                ["sample", "run", "1+1=?"],
                ["train", "--replay-from", "run", "--steps", "1", "--output", "out", "--dry-run"],
                ["publish", "run", "--to", "a/b", "--dry-run"],
            )
        )
    ]


def slurm(rng: random.Random, folder: Path) -> Lines:
    """A table of what a job asks for; the script that comes of it is run."""
    code = f"touch {folder / MARKER}"
    key = rng.choice(("partition", "account", "qos", "constraint", "setup", "setup"))
    end = rng.choice(("\n", "\r\n", "'\n", '"\n', "\u2028", "$(", "`", "; ", "\\\n", "\v", "\x85"))
    bad = f"x{end}{code}{rng.choice((' #', '', ')', '`'))}"
    value = json.dumps([code] if rng.random() < 0.5 else [bad]) if key == "setup" else json.dumps(bad)
    table = rng.choice((f"[slurm]\n{key} = {value}\n", f"slurm = {{{key} = {value}}}\n", f"slurm.{key} = {value}\n"))
    (folder / "theirs.toml").write_text(table)
    (folder / "bin").mkdir()
    for name in ("sbatch", "srun", "sacct"):
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    command = rng.choice((["train"], ["ablate", "--metric", "ent", "--seeds", "1"]))
    return [[*command, "--launcher", "slurm", "--config", "theirs.toml", "--dry-run", "--output", "out"]]


def _uses_of_a_model(rng: random.Random, model: str) -> list[str]:
    return rng.choice(
        (
            ["train", "--backbone", model, "--data", "q.parquet", "--heldout", "none", "--dry-run", "--output", "out"],
            ["evaluate", "arithmetic", "--data", "q-heldout.parquet", "--model", model, "--output", "out"],
            ["prepare", "bad.jsonl", "--backbone", model, "--output", "out.parquet"],
            ["prepare", "arithmetic", "--backbone", model, "--show", "1", "--output", "out.parquet"],
            ["train", "--backbone", model, "--steps", "1", "--output", "out", "--check"],
        )
    )


def _model_folder(rng: random.Random, folder: Path) -> tuple[Path, list[str]]:
    """A model folder of somebody's, in one of the places where the program looks for one; and a command."""
    if rng.random() < 0.3:
        use = rng.choice((["sample", "run", "1+1=?"], ["evaluate", "arithmetic", "--model", "run", "--output", "out"]))
        return folder / "run" / "model", use
    if rng.random() < 0.2:
        step = max((folder / "run" / "checkpoints").glob("step-*"))
        return step / "model", ["evaluate", "arithmetic", "--model", f"run@{step.name}", "--output", "out"]
    shutil.copytree(folder / "run" / "model", folder / "theirs")
    return folder / "theirs", _uses_of_a_model(rng, rng.choice(("theirs", "./theirs")))


def _change(file: Path, values: dict[str, object]) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({key: own for key, own in (content | values).items() if own is not None}))


def auto_map(rng: random.Random, folder: Path) -> Lines:
    """`auto_map` in a file of a model folder, with a type that transformers knows or not."""
    model, line = _model_folder(rng, folder)
    for name in ("evil.py", "modeling_evil.py", "custom_generate/generate.py"):
        (model / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "evil.py", model / name)
    name = rng.choice(
        ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json", "tokenizer.json")
    )
    module = rng.choice(("evil.Evil", "modeling_evil.Evil", "owner/name--evil.Evil"))
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")
    table = {kind: [module, module] if kind == "AutoTokenizer" else module for kind in rng.sample(kinds, 3)}
    unknown = {"model_type": "evil", "architectures": ["Evil"], "tokenizer_class": "Evil"}
    more = rng.choice(({}, unknown, {"model_type": None}, {"custom_generate": "evil", "trust_remote_code": True}))
    _change(model / name, {"auto_map": table, **more})
    if rng.random() < 0.3:
        _change(model / "config.json", {rng.choice(("attn_implementation", "_attn_implementation")): "owner/evil"})
    return [line]


def pickles(rng: random.Random, folder: Path) -> Lines:
    """A pickle among the weights, or in place of any file of a run or of a results folder."""
    content = pickle.dumps(Pickled(folder / MARKER), protocol=rng.choice((0, 2, 4)))
    if rng.random() < 0.5:
        model, line = _model_folder(rng, folder)
        name = rng.choice(("pytorch_model.bin", "model.bin", "x.pt", "adapter_model.bin", "model.safetensors"))
        if name != "model.safetensors" or rng.random() < 0.5:
            (model / "model.safetensors").unlink()
        (model / name).write_bytes(content)
        way = rng.choice(("", "index", "transformers_weights"))
        if way == "index":
            _change(model / "model.safetensors.index.json", {"metadata": {}, "weight_map": {"model.norm.weight": name}})
        elif way:
            _change(model / "config.json", {way: name})
        return [line]
    place = folder / rng.choice(("run", "run", "res"))
    rng.choice([path for path in sorted(place.rglob("*")) if path.is_file()]).write_bytes(content)
    of_run = (
        ["train", "--resume", "--output", "run", "--steps", "5"],
        ["replay-stats", "run"],
        ["report", "run", "--output", "page.html"],
        ["evaluate", "arithmetic", "--model", "run@latest", "--output", "out"],
    )
    return [rng.choice(of_run if place.name == "run" else (["evaluate", "--rescore", "--output", "res"],))]


def questions(rng: random.Random, folder: Path) -> Lines:
    """Metadata, sources and data sets that name code."""
    evil, system = rng.choice(("python:evil:f", "gym:evil", "evil", "gym:../evil")), f"touch {folder / MARKER}"
    metadata = rng.choice(({"verifier": evil}, {"verifier": evil, "entry": {"x": system}}, {"grader": evil}))
    row = {"question": "{{ cycler.__init__.__globals__.os.popen('" + system + "') }} 1+1", "answer": "2"}
    if rng.random() < 0.3:
        place = folder / "set"
        place.mkdir()
        shutil.copy(folder / "evil.py", place / "set.py")
        shutil.copy(folder / "evil.py", place / "dataset.py")
        tag = f"!!python/object/apply:os.system ['{system}']"
        (place / "README.md").write_text(f"---\nconfigs:\n- config_name: {tag}\n  data_files: x.jsonl\n---\n")
        (place / rng.choice(("x.jsonl", "x.json"))).write_text(json.dumps(row) + "\n")
        (place / "x.pkl").write_bytes(pickle.dumps(Pickled(folder / MARKER)))
        return [["prepare", "set", "--output", "out.parquet"]]
    more = rng.choice(({"metadata": metadata}, {"extra_info": metadata}, {"data_source": evil, **metadata}))
    (folder / "theirs.jsonl").write_text(json.dumps(row | more) + "\n")
    answer = rng.choice((f"__import__('os').system('{system}')", f"\\boxed{{exec('{system}')}}", "2"))
    (folder / "theirs.jsonl").open("a").write(json.dumps({"question": "1+2", "answer": answer}) + "\n")
    train = ["train", "--data", "theirs.jsonl", "--heldout", "none", "--output", "out", "--dry-run"]
    return [rng.choice((["prepare", "theirs.jsonl", "--output", "out.parquet"], train))]


def template(rng: random.Random, folder: Path) -> Lines:
    """A chat template that reaches for the system."""
    model, line = _model_folder(rng, folder)
    reach = rng.choice(
        (
            "cycler.__init__.__globals__.os",
            "lipsum.__globals__['os']",
            "''.__class__.__mro__[1].__subclasses__()[0].__init__.__globals__['os']",
            "messages.__class__.__base__.__subclasses__()",
            "(messages|attr('__class__'))",
            "self.__init__.__globals__.__builtins__.__import__('os')",
            "raise_exception.__globals__['__builtins__']['__import__']('os')",
            "strftime_now.__globals__['os']",
            "namespace.__init__.__globals__.os",
        )
    )
    text = f"{{{{ {reach}.system('touch {folder / MARKER}') }}}}{{{{ messages[0].content }}}}"
    if rng.random() < 0.5:
        (model / "chat_template.jinja").write_text(text)
    else:
        (model / "chat_template.jinja").unlink(missing_ok=True)
        _change(model / "tokenizer_config.json", {"chat_template": text})
    return [[*line, *([] if line[0] in ("sample", "train", "prepare") else ["--template", "chat"])]]


def results(rng: random.Random, folder: Path) -> Lines:
    """A results folder that names a grader of its author's."""
    function = _function(rng)
    file = folder / "res" / rng.choice(("protocol.json", "results.json"))
    content = json.loads(file.read_text())
    protocol = content.get("protocol", content)
    names = rng.choice(("grader", "second"))
    if names == "grader":
        protocol["grader"] = rng.choice(({"name": function, "version": "1"}, {"name": [function]}, function))
    else:
        content["second_graders"] = {function: {"avg_at_k": 1.0, "low": 0.0, "high": 1.0, "verdicts": {}}}
    file.write_text(json.dumps(content))
    again = ["evaluate", "arithmetic", "--data", "run/data/heldout.parquet", "--model", "run", "--output", "res"]
    return [rng.choice((["evaluate", "--rescore", "--output", "res"], ["evaluate", "--compare", "res", "res"], again))]


def gguf(rng: random.Random, folder: Path) -> Lines:
    """What calls itself a GGUF file."""
    content = rng.choice((pickle.dumps(Pickled(folder / MARKER)), b"GGUF" + os.urandom(60), b"GGUF\3" + bytes(60)))
    (folder / "theirs.gguf").write_bytes(content)
    _change(folder / "config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}})
    return [_uses_of_a_model(rng, "theirs.gguf")]


def modules(rng: random.Random, folder: Path) -> Lines:
    """A working folder with files named as modules that the program, or a process of its own, imports."""
    names = (
        "numpy",
        "torch",
        "filelock",
        "json",
        "transformers",
        "wandb",
        "peft",
        "kernels",
        "math_verify",
        "zstandard",
    )
    for name in rng.sample(names, 4):
        shutil.copy(folder / "evil.py", folder / f"{name}.py")
    ablate = ["ablate", "--methods", "grpo", "--seeds", "1", "--steps", "1", "--config", "small.toml", "--set"]
    ablate += ["arithmetic.num_heldout=2", "--output", "out"]
    evaluate = ["evaluate", "arithmetic", "--data", "q-heldout.parquet", "--model", "run", "--output", "out"]
    return [rng.choice((ablate, ["doctor"], ["prepare", "arithmetic", "--output", "out.parquet"], evaluate))]


def study(rng: random.Random, folder: Path) -> Lines:
    """A study with pickles named as those that a submission to Slurm would read, and modules in the working folder."""
    fake_slurm.install(folder / "bin")
    jobs = folder / "study" / "jobs"
    jobs.mkdir(parents=True)
    content = pickle.dumps(Pickled(folder / MARKER), protocol=rng.choice((0, 2, 4)))
    kinds = rng.choice((("_0_result",), ("_submitted",), ("_0_result", "_submitted")))
    for name in [f"{job}{task}{kind}.pkl" for job in (100, 101) for task in ("", "_0", "_1") for kind in kinds]:
        (jobs / name).write_bytes(content)
    for name in rng.sample(("submitit", "cloudpickle", "numpy", "sitecustomize", "exgrpo_cli"), 2):
        shutil.copy(folder / "evil.py", folder / f"{name}.py")
    if rng.random() < 0.3:
        shutil.copytree(folder / "run", folder / "study" / "grpo" / "seed-0")
    ablate = ["ablate", "--methods", rng.choice(("grpo", "grpo,exgrpo")), "--seeds", "1", "--steps", "1"]
    ablate += ["--config", "small.toml", "--set", "arithmetic.num_heldout=2", "--output", "study"]
    slurm = [*ablate, "--launcher", "slurm"]
    return [rng.choice((slurm, slurm, slurm, ablate, [*slurm, "--dry-run"], ["report", "study"]))]


def vouch(folder: Path) -> None:
    """Let every manifest of the run fit what is there: whoever sends a run sends these along."""
    for manifest in folder.rglob("manifest.json"):
        write_manifest(manifest.parent)
    checksums = folder / "checksums.json"
    if checksums.is_file():
        names = [name for name in json.loads(checksums.read_text())["files"] if (folder / name).is_file()]
        write_manifest(folder, names, file=checksums.name)


KINDS = {
    config: 6, method: 6, claim: 7, run_folder: 8, slurm: 6, auto_map: 8, pickles: 7, questions: 4, template: 3,
    results: 4, gguf: 1, modules: 2, study: 4,
}  # fmt: skip
"""Kinds of route with their weights."""


def plant(folder: Path) -> None:
    """The author's modules, in the working folder, where a setting that names them would find them."""
    evil = f"import os\nos.path.exists({str(folder / MARKER)!r}) or os.mknod({str(folder / MARKER)!r})\n"
    evil += "def f(*given, **named):\n    return True\nclass Evil:\n    pass\n"
    (folder / "evil.py").write_text(evil)
    (folder / "package").mkdir()
    for name in ("__init__.py", "evil.py"):
        (folder / "package" / name).write_text(evil)
    for seed in range(195, 215):
        (folder / f"evil{seed}.py").write_text(evil)


def trial(whole: Path, work: Path, number: int, seed: int) -> Finding:
    """Make one route in a copy of the folder, take it, and class what came."""
    rng = random.Random(f"{seed} {number}")
    fresh_copy(whole, work)
    plant(work)
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    [line] = kind(rng, work)
    with suppress(OSError, ValueError, KeyError):
        vouch(work / "run")
    stdin = rng.choice(("", "yes\n" * 50))
    variables = {"EXGRPO_CACHE": str(work / "cache"), "PATH": f"{work / 'bin'}:{os.environ['PATH']}"}
    outcome = exgrpo(line, work, seconds=300 if kind is study else 90, stdin=stdin, **variables)
    if kind is slurm and outcome.code == 0:
        text = outcome.out + outcome.err
        subprocess.run(["bash"], input=text[text.find("#!/bin/bash") :], text=True, cwd=work, capture_output=True)
    said = [own for own in outcome.err.splitlines() if own.startswith("exgrpo: ")][-1:]
    verdict = {0: "inert", 2: "refused", 1: "late", -99: "stopped", 130: "stopped"}.get(outcome.code, "ugly")
    if verdict != "stopped" and outcome.ugly:
        verdict, said = "ugly", [outcome.err[-300:]]
    if (work / MARKER).exists():
        verdict = "run"
    answer = "yes" if stdin else "nothing"
    return Finding(number, f"{kind.__name__} ({answer}): {' '.join(line)}", verdict, outcome.code, str(said)[:400])


def main() -> None:
    options = parser_of(__doc__, 55, "routes").parse_args()
    with tempfile.TemporaryDirectory(prefix="exgrpo-foreign-") as name:
        whole, work = options.folder or Path(name, "whole"), Path(name, "work")
        if not whole.is_dir():
            whole.mkdir()
            build(whole)
        for odd in ("fifo", "loop"):
            (whole / odd).unlink(missing_ok=True)
        defects = campaign(
            "foreign code", options, trials_of(options), lambda number: trial(whole, work, number, options.seed), BAD
        )
    raise SystemExit(bool(defects))


if __name__ == "__main__":
    main()
