"""The tests for a GPU, run once with tiny shapes on the CPU: so that their own code works where they are wanted."""

from pathlib import Path

import pytest
from processes import python


@pytest.mark.engines
def test_the_tests_for_a_gpu_run_on_a_cpu_with_tiny_shapes(tmp_path: Path) -> None:
    command = ["-m", "pytest", "-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    variables = {"EXGRPO_GPU_TESTS_ON": "cpu"}
    done = python(*command, variables=variables, cwd=Path(__file__).parents[2], timeout=900)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "skipped" not in done.stdout
    assert "| hf, torch | update | " in done.stdout
