"""Standard output is data: what other packages print there ends on stderr, in a process and in those it starts."""

import json
from pathlib import Path

from processes import python

NOISY = """
import os, sys
from exgrpo_cli import main, presets

original = presets.preset_names

def noisy(kind):
    print("from Python")
    os.write(1, b"from C\\n")
    os.system("echo from a child")
    return original(kind)

presets.preset_names = noisy
sys.argv = ["exgrpo", *sys.argv[1:]]
main.main()
"""
RANKS = """
import os, sys
from exgrpo_cli.base.output import data_alone, give_stdout_to_children, reserve_stdout

reserve_stdout()
with data_alone():
    os.system("echo from an engine")
    give_stdout_to_children()
    os.system("echo from a rank")
"""


def test_what_others_print_does_not_reach_the_data() -> None:
    done = python("-c", NOISY, "presets", "--json")
    assert "backbones" in json.loads(done.stdout)
    for chatter in ("from Python", "from C", "from a child"):
        assert chatter in done.stderr
    tables = python("-c", NOISY, "presets").stdout
    assert "qwen-math-1.5b" in tables and "from " not in tables.splitlines()[0]


def test_help_is_data() -> None:
    assert "Usage: exgrpo" in python("-c", NOISY, "--help").stdout


def test_ranks_write_data_of_their_own() -> None:
    done = python("-c", RANKS)
    assert (done.stdout, done.stderr) == ("from a rank\n", "from an engine\n")


def test_commands_write_their_data_where_it_is_kept_apart() -> None:
    """`typer.echo` and `print` write to `sys.stdout`, which is stderr while a command runs."""
    commands = Path(__file__).parents[2] / "commands"
    sources = {path.name: path.read_text() for path in commands.glob("*.py") if path.name != "cli.py"}
    # --version is no command.
    assert [name for name, text in sources.items() if "typer.echo(" in text or " print(" in text] == ["__init__.py"]
