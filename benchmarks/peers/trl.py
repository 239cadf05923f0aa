"""A step of `exgrpo train` beside one of TRL's GRPOTrainer: the same backbone, questions, lengths and updates.

    python3 -m venv trl-env
    trl-env/bin/pip install trl==1.16.0 torch==2.13.0    # where torch brings CUDA along, add
                                                         # --index-url https://download.pytorch.org/whl/cpu
    python benchmarks/peers/trl.py --python trl-env/bin/python
    python benchmarks/peers/trl.py --python trl-env/bin/python --shape 30m
    python benchmarks/peers/trl.py --python trl-env/bin/python --shape smollm2 --set backbone.source=FILE.gguf
    python benchmarks/peers/trl.py --beside optim.matmul_dtype=bfloat16    # exgrpo itself, by other settings

Each trains in a process of its own, and they take steps in turn: what else the machine does meets both. A step is
B questions x K rollouts, their grading, log-probs under the policy that sampled them and M updates; ours also keeps the
ledger and the journal. At a learning rate of 1e-9 nothing is learned, so both go on sampling rollouts of the same
lengths. TRL runs without gradient checkpointing, in float32, with micro-batches of a whole update and a grader that
compares the end of a text. CPU time is that of a process and of all that it has started.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

SHAPES = {
    "tiny": (),
    "30m": (
        "tiny.hidden_size=512",
        "tiny.num_layers=8",
        "tiny.num_heads=8",
        "tiny.num_kv_heads=4",
        "tiny.ffn_size=1920",
        "tiny.warm_start_steps=1",
        "rollout.questions_per_step=8",
        "objective.entropy_coefficient=1e-12",
    ),
    "smollm2": ("rollout.questions_per_step=2", "objective.entropy_coefficient=1e-12"),
}
"""Settings of ours. The larger backbone is all but random, so responses run to the limit and earn nothing: an entropy
bonus too small to matter has all rows trained, as TRL does."""
BACKBONES = {"smollm2": "smollm2-135m"}
"""Preset of a shape's backbone, where it is not the tiny one."""
SETTINGS = (
    "optim.learning_rate=1e-9",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    "validation.every=0",
    "data.heldout=none",
    "run.save_every=1000000",
    "run.steps=1000000",
    "run.plots=false",
)
NAMES = ("exgrpo", "other")
TICKS = os.sysconf("SC_CLK_TCK")


def train_ours(load: Mapping[str, Any], channel: Connection, further: Sequence[str] = ()) -> None:
    """Train as `exgrpo train` does, with `further` settings, waiting for a word after every step."""
    from exgrpo_cli.base.errors import Interrupted
    from exgrpo_cli.base.reporter import SilentReporter
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.training.run import train

    class Waiting(SilentReporter):
        def step(self, line: Mapping[str, Any], total: int) -> None:
            channel.send({"generated": line["tokens/generated"], "trained": line["tokens/trained"]})
            if not channel.recv():
                raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder, suppress(Interrupted):
        train(
            build_config(backbone=load["backbone"], assignments=[*load["settings"], *further]),
            Path(folder) / "run",
            reporter=Waiting(),
        )


def train_theirs(load: Mapping[str, Any], channel: Connection) -> None:
    """Train with GRPOTrainer, waiting for a word whenever the updates of its rollouts are done."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(load["threads"])
    tokenizer = AutoTokenizer.from_pretrained(load["folder"])
    first = load["rows"][0]
    encoded = tokenizer.apply_chat_template(first["prompt"], add_generation_prompt=True)["input_ids"]
    assert encoded == load["first_prompt"], (encoded, load["first_prompt"])
    generated: list[int] = []

    def reward(completions: Any, completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        generated.append(sum(len(ids) for ids in completion_ids))
        texts = [completion[0]["content"] for completion in completions]
        return [float(text.rstrip().endswith(f"{{{gold}}}")) for text, gold in zip(texts, answer, strict=True)]

    class Waiting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % load["minibatches"] == 0:
                channel.send({"generated": generated[-1], "trained": generated[-1]})
                control.should_training_stop = not channel.recv()

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(load["folder"], dtype=torch.float32),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                learning_rate=1e-9,
                lr_scheduler_type="constant",
                max_steps=1_000_000,
                per_device_train_batch_size=load["questions"] * load["group_size"] // load["minibatches"],
                steps_per_generation=load["minibatches"],
                num_generations=load["group_size"],
                max_completion_length=load["max_tokens"],
                temperature=load["temperature"],
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(load["rows"]),
            processing_class=tokenizer,
            callbacks=[Waiting()],
        )
        trainer.train()


def make_load(shape: str, threads: int, settings: list[str]) -> dict[str, Any]:
    """What both train on: the backbone's folder, questions with their answers, sizes of a step."""
    from transformers import AutoTokenizer

    from exgrpo_cli.base.reporter import SilentReporter
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.models.load import locate
    from exgrpo_cli.questions.prompts import encode
    from exgrpo_cli.training.questions import load_questions
    from exgrpo_cli.training.setup import choose_run_template

    chosen = [*SETTINGS, *SHAPES[shape], f"run.threads={threads}", *settings]
    config = build_config(backbone=BACKBONES.get(shape), assignments=chosen)
    folder = locate(config.backbone, config.tiny)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = load_questions(config, SilentReporter()).train
    first = encode(choose_run_template(config, tokenizer), questions[0], tokenizer)
    return {
        "backbone": BACKBONES.get(shape),
        "settings": chosen,
        "threads": threads,
        "folder": str(folder),
        "first_prompt": first.tolist(),
        "rows": [
            {
                "prompt": [{"role": message.role, "content": message.content} for message in question.prompt],
                "answer": question.answer,
            }
            for question in questions
        ],
        "questions": config.rollout.questions_per_step,
        "group_size": config.rollout.group_size,
        "max_tokens": config.rollout.max_response_tokens,
        "temperature": config.rollout.temperature,
        "minibatches": config.optim.minibatches,
    }


def cpu_seconds(process: int) -> float:
    """Of a process and of those it has started that still run."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    children = [int(c) for file in Path(f"/proc/{process}/task").glob("*/children") for c in file.read_text().split()]
    return (int(user) + int(system)) / TICKS + sum(map(cpu_seconds, children))


def start(name: str, python: str, folder: Path, threads: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process that trains as `name` does, and the line to it."""
    address = str(folder / name)
    with Listener(address) as listener:
        # Without -P this file would be found as the package `trl`.
        command = [python, "-P", str(Path(__file__).resolve()), "--train", name, "--folder", str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        return process, listener.accept()


def measure(python: str | None, load: Mapping[str, Any], steps: int, warmup: int) -> dict[str, Any]:
    """Wall and CPU seconds and tokens of `steps` steps of both, taken in turn after `warmup` steps each."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "load.json").write_text(json.dumps(load))
        trainers = {
            name: start(name, path, Path(folder), load["threads"])
            for name, path in zip(NAMES, (sys.executable, python or sys.executable), strict=True)
        }
        for _, channel in trainers.values():
            channel.recv()
        for step in range(warmup - 1 + steps):
            for name in NAMES if step % 2 else reversed(NAMES):
                process, channel = trainers[name]
                before, started = cpu_seconds(process.pid), time.perf_counter()
                channel.send(True)
                tokens = channel.recv()
                seconds = {"wall": time.perf_counter() - started, "cpu": cpu_seconds(process.pid) - before}
                taken[name].append(seconds | tokens)
        for process, channel in trainers.values():
            channel.send(False)
            process.wait(60)
    return {name: rows[warmup - 1 :] for name, rows in taken.items()}


def versions(python: str | None) -> str:
    """Of what both run on."""
    ours = f"exgrpo {version('exgrpo')}, torch {version('torch')}, transformers {version('transformers')}"
    if python is None:
        return ours
    code = "from importlib.metadata import version as v; print(v('trl'), v('torch'), v('transformers'))"
    found = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return f"{ours}; TRL {found[0]}, torch {found[1]}, transformers {found[2]}"


def show(taken: Mapping[str, list[dict[str, float]]], name: str) -> None:
    """Medians of exgrpo and the other, `name`, and medians of the ratios of steps taken in turn."""
    ours, theirs = (taken[name] for name in NAMES)
    print(f"{'a step':22}{'exgrpo':>10}{name:>10}{f'{name} / exgrpo':>17}{'by quarter':>16}")
    for key, label, form in (
        ("wall", "seconds", ".2f"),
        ("cpu", "CPU seconds", ".2f"),
        ("generated", "tokens generated", ",.0f"),
        ("trained", "tokens trained", ",.0f"),
    ):
        ratios = [other[key] / own[key] for own, other in zip(ours, theirs, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        one, other = (statistics.median(row[key] for row in rows) for rows in (ours, theirs))
        print(f"{label:22}{one:10{form}}{other:10{form}}{middle:17.2f}{f'{low:.2f} - {high:.2f}':>16}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="the interpreter of TRL's environment")
    parser.add_argument("--beside", action="append", default=[], metavar="KEY=VALUE", help="of exgrpo in TRL's place")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="steps of each that count")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before them")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of exgrpo's")
    parser.add_argument("--train", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: quarters take two steps or more")
    if options.train:
        load = json.loads((options.folder / "load.json").read_text())
        with Client(str(options.folder / options.train)) as channel:
            if options.train == "other" and not load["beside"]:
                train_theirs(load, channel)
            else:
                train_ours(load, channel, load["beside"] if options.train == "other" else ())
        return
    if bool(options.python) == bool(options.beside):
        parser.error("give either --python, the interpreter of an environment with TRL (see above), or --beside")
    print(f"{versions(options.python)}; {options.shape}, threads {options.threads}, {os.cpu_count()} cores")
    print(f"load average before {os.getloadavg()[0]:.1f}", flush=True)
    load = make_load(options.shape, options.threads, options.set) | {"beside": options.beside}
    show(measure(options.python, load, options.steps, options.warmup), "TRL" if options.python else "beside")
    print(f"load average after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
