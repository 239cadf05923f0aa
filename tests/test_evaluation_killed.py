"""The verl-layout file of the field asked of a small backbone, killed in the middle and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exgrpo_cli.evaluation.runner import sample_seeds

COPIES = 8


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from exgrpo_cli.commands import main; main()", "eval", *arguments]


def kill_once_a_question_is_finished(arguments: list[str], records: Path) -> bytes:
    """What the killed process left."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (records.exists() and b"\n" in records.read_bytes()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return records.read_bytes()


def killed_and_resumed(
    data: Path, model: Path, output: Path, benchmark: str, *options: str
) -> tuple[dict[str, Any], str]:
    """Results of a run that was killed and gone on with, and what the second run said."""
    arguments = [benchmark, "--data", str(data), "--model", str(model), "--device", "cpu", "--output", str(output)]
    # Long enough for every sum; what does not end would otherwise fill the window.
    arguments += ["--max-tokens", "128"]
    records = output / "records.jsonl"
    left = kill_once_a_question_is_finished(arguments, records)
    whole = left[: left.rfind(b"\n") + 1]
    finished = subprocess.run(command(*arguments, "--json"), capture_output=True, text=True, check=True)
    assert records.read_bytes().startswith(whole)
    result = json.loads(finished.stdout)[benchmark]
    assert 0 < whole.count(b"\n") < result["questions"]
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len({line["question_id"] for line in lines}) == len(lines) == result["questions"]
    for line in lines:
        seeds = [sample["seed"] for sample in line["samples"]]
        assert seeds == list(sample_seeds(0, line["question_id"], result["k"]))
    assert sum(result["verdicts"].values()) == result["questions"] * result["k"]
    return result, finished.stderr


def check_stamp(stamp: dict[str, Any], *, questions: int, folded: int) -> None:
    assert (stamp["benchmark"]["questions"], stamp["benchmark"]["folded_rows"]) == (questions, folded)
    assert (stamp["sampling"]["samples"], stamp["sampling"]["temperature"], stamp["sampling"]["top_p"]) == (32, 0.6, 1)
    assert stamp["prompt"]["template"] == "chat" and stamp["prompt"]["opens_think"]
    assert stamp["engine"]["name"] == "hf" and len(stamp["model"]["hash"]) == 32


def verl_rows(source: str, count: int) -> list[dict[str, Any]]:
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{number}+1=?"}],
            "reward_model": {"ground_truth": str(number + 1), "style": "rule"},
            "extra_info": {"index": number},
        }
        for number in range(count)
    ]


def test_a_file_of_two_benchmarks_killed_and_gone_on_with(tmp_path, small_backbone):
    data = tmp_path / "mixed.parquet"
    pq.write_table(pa.Table.from_pylist([*verl_rows("aime", 8) * COPIES, *verl_rows("math", 3)]), data)
    result, said = killed_and_resumed(data, small_backbone, tmp_path / "results", "aime24")
    assert (result["questions"], result["k"]) == (8, 32)
    check_stamp(result["protocol"], questions=8, folded=56)
    assert "aime24: 56 repeated rows folded into 8 questions" in said
    assert "aime24: going on after" in said


def test_aime24_of_the_real_file_killed_and_gone_on_with(tmp_path, small_backbone, shared_data):
    data = shared_data / "verl_format_aime24_math500.parquet"
    rows = pq.read_table(data, columns=["data_source", "prompt"]).to_pylist()
    distinct = {row["prompt"][-1]["content"] for row in rows if row["data_source"] == "aime"}
    num_rows = Counter(row["data_source"] for row in rows)["aime"]
    assert (num_rows, len(distinct)) == (240, 30)
    result, _ = killed_and_resumed(data, small_backbone, tmp_path / "results", "aime24")
    assert (result["questions"], result["k"]) == (30, 32)
    check_stamp(result["protocol"], questions=30, folded=240 - 30)
