"""vLLM on the CPU: a real server asked through the endpoint path, and an engine that two ranks hold."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import python
from random_model import questions_file
from two_ranks import free_port

from exgrpo_cli.base import errors, types
from exgrpo_cli.evaluation.server import Endpoint

pytestmark = pytest.mark.engines
WINDOW = 512
START_SECONDS = 240


@pytest.fixture(scope="module")
def url(vllm_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(vllm_backbone)]
    command += ["--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(WINDOW), "--enforce-eager", "--max-num-seqs", "16"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_for(address, process, log)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"no server after {START_SECONDS} s: {log.read_text()[-3000:]}")


@pytest.mark.timeout(400)
def test_seeds_routes_limits_and_refusals(url):
    endpoint = Endpoint(url=url, model="small")
    params = types.SamplingParams(temperature=1.5, top_p=1.0, max_new_tokens=48)
    prompt = (types.Message(role="user", content="7+5-3+4=?"),)
    first, again, other = (endpoint.respond(prompt, seed, params) for seed in (2**63 - 2, 2**63 - 2, 5))
    assert first == again and first.text != other.text and first.num_tokens > 0
    # Plain text goes to the other route.
    short = types.SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=3)
    response = endpoint.respond("<|user|>7+5=?<|assistant|><think>\n", 1, short)
    assert (response.num_tokens, response.stop_reason) == (3, types.StopReason.LENGTH)
    with pytest.raises(errors.RunError, match=r"refused the request with status 400.*(512|max_tokens)"):
        endpoint.respond("7+5=?", 1, types.SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=8192))
    with pytest.raises(errors.InputError, match="serves small, not 'large'"):
        Endpoint(url=url, model="large").check()


@pytest.mark.timeout(400)
def test_two_ranks_hold_one_vllm_engine(tmp_path, vllm_backbone):
    arguments = [
        "--data", str(questions_file(tmp_path, 6)), "--model", str(vllm_backbone), "--device", "cpu", "--engine",
        "vllm", "--json",
    ]  # fmt: skip
    arguments += ["--max-tokens", "16", "--output", str(tmp_path / "results")]
    command = ["-m", "exgrpo_cli", "eval", *arguments, "--tensor-parallel"]
    finished = python(*command, "2")
    assert finished.returncode == 0, finished.stderr[-3000:]
    result = json.loads(finished.stdout)["sums"]
    assert (result["questions"], result["protocol"]["engine"]["tensor_parallel"]) == (6, 2)
    # Two heads cannot be held by three ranks.
    command[-2] = str(tmp_path / "three")
    refused = python(*command, "3")
    assert refused.returncode == 2
    assert re.search(r"vLLM refuses .*: Total number of attention heads \(2\) must be divisible", refused.stderr)
