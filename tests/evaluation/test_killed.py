"""The verl-layout file of the field asked of a small backbone, killed in the middle and gone on with."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from benchmark_layouts import verl

from exgrpo_cli.config.sections.run import TinySettings
from exgrpo_cli.evaluation.sampling import sample_seeds
from exgrpo_cli.models.export import export_model
from exgrpo_cli.models.tiny import make_model, make_tokenizer


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random backbone with room for every prompt and attention heads of a size vLLM has CPU kernels for."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(max_tokens=8192)
    model = make_model(TinySettings(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, ffn_size=64), tokenizer)
    folder = tmp_path_factory.mktemp("models") / "untrained"
    export_model(model, tokenizer, folder, eos_ids=(tokenizer.eos_token_id,))
    return folder


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from exgrpo_cli.main import main; main()", "eval", *arguments]


KILLED_AT_THE_FIRST_RECORD = """
import os, signal
from exgrpo_cli.evaluation.results import ResultsFolder
from exgrpo_cli.main import main
append = ResultsFolder.append
def append_one_and_die(folder, records):
    for record in records:
        append(folder, [record])
        os.kill(os.getpid(), signal.SIGKILL)
ResultsFolder.append = append_one_and_die
main()
"""


@pytest.mark.engines
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["hf", "vllm"])
@pytest.mark.parametrize(
    ("benchmark", "questions", "folded", "samples"), [("aime24", 30, 210, 8), ("math500", 500, 0, 1)]
)
def test_the_real_file_killed_and_gone_on_with(
    tmp_path, untrained, shared_data, benchmark, questions, folded, samples, engine
):
    records = tmp_path / "results" / "records.jsonl"
    arguments = [benchmark, "--data", str(shared_data / "verl_format_aime24_math500.parquet"), "--device", "cpu"]
    arguments += ["--model", str(untrained), "--output", str(records.parent), "--engine", engine]
    arguments += ["--samples", str(samples), "--max-tokens", "64" if engine == "vllm" else "16"]
    program = [sys.executable, "-c", KILLED_AT_THE_FIRST_RECORD, "eval", *arguments]
    killed = subprocess.run(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=240, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = records.read_bytes()
    whole = left[: left.rfind(b"\n") + 1]
    finished = subprocess.run(command(*arguments, "--json"), capture_output=True, text=True, check=True)
    assert f"{benchmark}: going on after" in finished.stderr
    assert records.read_bytes().startswith(whole) and whole.count(b"\n") == 1
    result = json.loads(finished.stdout)[benchmark]
    assert (result["questions"], result["k"]) == (questions, samples)
    lines = [json.loads(line) for line in records.read_bytes().splitlines()]
    assert len({line["question_id"] for line in lines}) == len(lines) == questions
    for line in lines:
        seeds = [sample["seed"] for sample in line["samples"]]
        assert seeds == list(sample_seeds(0, line["question_id"], samples))
    stamp = result["protocol"]
    assert (stamp["benchmark"]["folded_rows"], stamp["engine"]["name"]) == (folded, engine)
    assert stamp["prompt"]["template"] == "chat" and stamp["prompt"]["opens_think"]


@pytest.mark.engines
@pytest.mark.timeout(400)
def test_two_ranks_hold_one_vllm_engine(tmp_path, untrained):
    data = tmp_path / "sums.parquet"
    rows = [verl("sums")(f"{number}+1=?", str(number + 1)) for number in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), data)
    arguments = ["--data", str(data), "--model", str(untrained), "--device", "cpu", "--engine", "vllm", "--json"]
    arguments += ["--max-tokens", "16", "--output", str(tmp_path / "results")]
    options = ["--tensor-parallel", "2"]
    finished = subprocess.run(command(*arguments, *options), capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = json.loads(finished.stdout)["sums"]
    assert (result["questions"], result["protocol"]["engine"]["tensor_parallel"]) == (6, 2)
    # Two heads cannot be held by three ranks.
    arguments[-1] = str(tmp_path / "three")
    refused = subprocess.run(command(*arguments, "--tensor-parallel", "3"), capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert re.search(r"vLLM refuses .*: Total number of attention heads \(2\) must be divisible", refused.stderr)
