"""The command line as a whole: quick help, examples that can be pasted, one line and one exit code per error."""

import inspect
import re
import shlex
import subprocess
import sys
import warnings

import numpy as np
import pytest
import typer
from processes import python
from safetensors.numpy import save_file

from exgrpo_cli.base import errors, versions
from exgrpo_cli.commands import app, run
from exgrpo_cli.ledger.reader import LedgerWarning

HEAVY = ("torch", "transformers", "vllm", "deepspeed", "pyarrow", "numpy", "pandas", "matplotlib", "scipy", "sympy")
COMMANDS = {info.name or info.callback.__name__: info.callback for info in app.registered_commands}


def test_the_promised_commands_are_there():
    promised = "prepare train replay-stats report verify fork publish sample evaluate eval ablate doctor presets new"
    assert set(COMMANDS) == set(promised.split())


def test_help_imports_nothing_heavy():
    """Importing torch alone takes seconds: help must not need it, for any command."""
    code = (
        "import sys; from exgrpo_cli.commands import run; "
        f"codes = [run([*name, '--help']) for name in [[], *[[each] for each in {sorted(COMMANDS)!r}]]]; "
        f"print([name for name in {HEAVY!r} if name in sys.modules], codes, file=sys.stderr)"
    )
    done = python("-c", code, check=True)
    assert done.stderr.splitlines()[-1] == f"[] {[0] * (1 + len(COMMANDS))}"
    assert "Usage: exgrpo train" in done.stdout


@pytest.mark.parametrize("options", [[], ["--backbone", "qwen-math-1.5b", "--data", "arithmetic", "--heldout", "none"]])
def test_a_plan_imports_nothing_heavy(options, tmp_path):
    """A model is loaded after the plan, in seconds; torch is asked only where there may be a GPU."""
    heavy = sorted(set(HEAVY) - {"numpy", "pyarrow", "torch" if versions.has_gpu_device() else ""})
    code = (
        f"import sys; from exgrpo_cli.commands import run; code = run(['train', '--dry-run', *{options!r}]); "
        f"print([name for name in {heavy!r} if name in sys.modules], code, file=sys.stderr)"
    )
    done = python("-c", code, check=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "[] 0"
    assert "# one step" in done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_one_sentence_and_examples_that_parse(name):
    paragraphs = inspect.getdoc(COMMANDS[name]).split("\n\n")
    assert re.fullmatch(r"[^.]+(\.\S[^.]*)*\.", paragraphs[0].replace("\n", " ")), paragraphs[0]
    examples = [line.strip() for line in paragraphs[-1].splitlines() if line.strip().startswith("exgrpo ")]
    assert examples
    group = typer.main.get_command(app)
    for example in examples:
        program, command, *arguments = shlex.split(example)
        assert program == "exgrpo"
        assert COMMANDS[command] is COMMANDS[name]
        # Parses types and option names without running anything; raises on an unknown option.
        group.commands[command].make_context(command, arguments)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_has_help_that_is_shown_word_by_word(name, monkeypatch, capsys):
    """Brackets included, which a markup would eat."""
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    assert run([name, "--help"]) == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    parameters = typer.main.get_command(app).commands[name].params
    told = {parameter.name: " ".join((parameter.help or "").split()) for parameter in parameters}
    assert [name for name, text in told.items() if not text or text not in shown] == []


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("exgrpo re", ["replay-stats", "report"]), ("exgrpo train --time", ["--time-limit"]),
        ("exgrpo train --method ent-m", ["ent-max", "ent-min"]), ("exgrpo train --rollout v", ["vllm"]),
        ("exgrpo ablate --regimes strong,spar", ["strong,sparse"]), ("exgrpo evaluate aime24 math", ["math500"]),
        ("exgrpo presets qwen-math-1", ["qwen-math-1.5b"]),
    ],
)  # fmt: skip
def test_a_shell_completes_commands_options_and_values(line, offered, monkeypatch, capsys):
    monkeypatch.setenv("_EXGRPO_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        run([])
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert (told.out.split(), told.err) == (offered, "")


ERRORS = {
    "refused": (errors.InputError("data.parquet, row 3: answer is empty: drop the row."), 2),
    "stopped": (errors.RunError("weights differ\nafter the sync."), 1),
    "interrupted": (errors.Interrupted("stopped after step 3; go on with: exgrpo train --resume"), 130),
    "ctrl-c": (KeyboardInterrupt(), 130),
    "disk": (OSError(28, "No space left on device", "runs/x/metrics.jsonl"), 1),
    "surprise": (ZeroDivisionError("division by zero"), 1),
}


@pytest.fixture
def failing() -> typer.Typer:
    """A command line whose commands fail, one way each."""
    commands = typer.Typer(pretty_exceptions_enable=False)
    for name, (error, _) in ERRORS.items():

        def fail(debug: bool = typer.Option(False, "--debug"), error: str = typer.Option(name, hidden=True)) -> None:
            raise ERRORS[error][0]

        commands.command(name)(fail)
    return commands


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_each_error_has_its_exit_code_and_one_line(failing, name, capsys):
    assert run([name], failing) == ERRORS[name][1]
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith("exgrpo: ")
    expected = {"disk": "runs/x/metrics.jsonl: No space left on device", "ctrl-c": "interrupted"}
    assert expected.get(name, str(ERRORS[name][0]).split("\n")[0]) in err
    assert run([name, "--debug"], failing) == ERRORS[name][1]
    assert ("Traceback (most recent call last)" in capsys.readouterr().err) == (name != "ctrl-c")


def said_of(work, capsys) -> str:
    """What a command says that ends with an error of `work`."""
    commands = typer.Typer(pretty_exceptions_enable=False)
    commands.command()(work)
    assert run([], commands) == 1
    return capsys.readouterr().err


class PanicException(BaseException):
    """As Rust's comes through its bindings."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("could not create a primitive descriptor"),
        ValueError("realloc of size 256 failed"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."),
        PanicException("The global thread pool has not been initialized.: ThreadPoolBuildError"),
    ],
)
def test_a_limit_of_the_system_is_called_one(error, capsys):
    def fail() -> None:
        raise error

    err = said_of(fail, capsys)
    assert err.startswith(f"exgrpo: the system gave no more memory or threads ({str(error) or 'MemoryError'})")
    assert "ulimit" in err and len(err.splitlines()) == 1


def test_what_the_system_refuses_a_library_in_rust_is_one_line(tmp_path, capsys):
    err = said_of(lambda: save_file({"w": np.zeros(4)}, tmp_path / "not there" / "model.safetensors"), capsys)
    assert "(os error 2)" in err and "make room, or choose another place" in err
    assert "unexpected" not in err and len(err.splitlines()) == 1


def test_a_warning_of_the_toolkit_is_one_line(capsys):
    """No file name, no line of code; with --quiet what is damaged alone. Others' warnings are shown with --debug."""
    commands = typer.Typer(pretty_exceptions_enable=False)

    @commands.command()
    def warn(quiet: bool = typer.Option(False, "--quiet"), debug: bool = typer.Option(False, "--debug")) -> None:
        warnings.warn("all_gather_into_tensor is deprecated", FutureWarning, stacklevel=2)
        warnings.warn("the limit is\nlow", errors.ToolkitWarning, stacklevel=2)
        warnings.warn("runs/x/replay: read up to step 9;\n1 part left out", LedgerWarning, stacklevel=2)

    damage = "exgrpo: runs/x/replay: read up to step 9; 1 part left out\n"
    with warnings.catch_warnings(action="always"):
        assert run([], commands) == 0
        assert capsys.readouterr().err == f"exgrpo: the limit is low\n{damage}"
        assert run(["--quiet"], commands) == 0
        assert capsys.readouterr().err == damage
        assert run(["--debug"], commands) == 0
        assert "FutureWarning: all_gather_into_tensor is deprecated" in capsys.readouterr().err


def test_a_reader_that_leaves_ends_the_command_quietly():
    """`exgrpo presets | head -0`: the pipe is closed before anything is written."""
    command = f"{sys.executable} -m exgrpo_cli presets | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
