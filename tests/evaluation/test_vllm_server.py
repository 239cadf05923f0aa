"""The endpoint path against a real vLLM server on CPU: seeds, both routes, refusals, an evaluation end to end."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.base.types import Message, SamplingParams, StopReason
from exgrpo_cli.config.sections.run import TinySettings
from exgrpo_cli.evaluation.server import Endpoint
from exgrpo_cli.models.export import export_model
from exgrpo_cli.models.tiny import make_model, make_tokenizer

pytestmark = pytest.mark.engines
WINDOW = 512
START_SECONDS = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: what is tested is the line to the server. Heads of 32, the smallest that vLLM computes on CPU."""
    folder = tmp_path_factory.mktemp("models") / "random"
    torch.manual_seed(0)
    tokenizer = make_tokenizer(max_tokens=WINDOW)
    made = make_model(TinySettings(hidden_size=128, num_layers=1, num_heads=4, num_kv_heads=2), tokenizer)
    export_model(made, tokenizer, folder, eos_ids=(tokenizer.eos_token_id,))
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
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
    params = SamplingParams(temperature=1.5, top_p=1.0, max_new_tokens=48)
    prompt = (Message(role="user", content="7+5-3+4=?"),)
    first, again, other = (endpoint.respond(prompt, seed, params) for seed in (2**63 - 2, 2**63 - 2, 5))
    assert first == again and first.text != other.text and first.num_tokens > 0
    # Plain text goes to the other route.
    short = SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=3)
    response = endpoint.respond("<|user|>7+5=?<|assistant|><think>\n", 1, short)
    assert (response.num_tokens, response.stop_reason) == (3, StopReason.LENGTH)
    with pytest.raises(RunError, match=r"refused the request with status 400.*(512|max_tokens)"):
        endpoint.respond("7+5=?", 1, SamplingParams(temperature=0.6, top_p=1.0, max_new_tokens=8192))
    with pytest.raises(InputError, match="serves small, not 'large'"):
        Endpoint(url=url, model="large").check()
    assert endpoint.stamp()["engine"]["version"].startswith("0.")
