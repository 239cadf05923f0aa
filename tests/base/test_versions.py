"""Advice on what to install works where it is given."""

from pathlib import Path

import pytest

from exgrpo_cli.base.versions import install_command


def test_the_line_that_installs_an_extra_works_in_and_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert install_command("gguf") == "pip install -c constraints.txt -e '.[gguf]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("gguf") == "pip install 'exgrpo[gguf]'"
