"""The `exgrpo` command: its subcommands, and the one place where an error becomes a line and an exit code."""

import errno
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from exgrpo_cli.base import errors
from exgrpo_cli.base.output import PrintableRecord, data_alone, interrupts_kept, loading_note, tell_warnings
from exgrpo_cli.commands.cli import talk, template
from exgrpo_cli.commands.evaluate import evaluate


class PlainFlags:
    """Help that puts no type beside an option that is merely given or not: "<bool>" reads as if a value followed."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, flags without a metavar."""
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class CommandGroup(PlainFlags, TyperGroup):
    """The program itself."""


class Command(PlainFlags, TyperCommand):
    """One command of it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what other packages print meanwhile is talk."""
        with data_alone():
            return super().invoke(ctx)


app = typer.Typer(
    cls=CommandGroup,
    name="exgrpo",
    help="Train language models by reinforcement learning that replays their own correct reasoning (ExGRPO).",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True),
) -> None:
    """The options that stand before any command; without one a greeting."""
    if version:
        from exgrpo_cli import __version__

        typer.echo(f"exgrpo {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(template("greeting"), nl=False)


COMMANDS = (
    "prepare", "train", "replay_stats", "report", "verify", "fork", "publish", "sample", "evaluate", "ablate", "doctor",
    "presets", "new",
)  # fmt: skip
"""In the order of the help: modules of this package, and the function of the same name in each."""
for name in COMMANDS:
    command = getattr(import_module(f"exgrpo_cli.commands.{name}"), name)
    app.command(name.replace("_", "-"), cls=Command)(command)
app.command("eval", cls=Command, hidden=True)(evaluate)


def run(arguments: list[str], commands: typer.Typer = app) -> int:
    """Run one command line; every error ends here, as one line on stderr (`--debug`: with its traceback)."""
    try:
        # Of several ranks rank 0 says what is to be said.
        quiet = "--quiet" in arguments or "RANK" in os.environ
        with (
            interrupts_kept(),
            _warnings_as_lines(quiet="--quiet" in arguments, debug="--debug" in arguments),
            loading_note(partial(talk, quiet=quiet)),
        ):
            code = commands(arguments, prog_name="exgrpo", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        message = _one_line(_unknown_option(error) or _with_value(error)).rstrip(".")
        end = "" if message.endswith("?") else "."
        talk(f"exgrpo: {message}{end} See `{_help_line(arguments)}`.")
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output left, as `| head` does. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_STOPPED
    except BaseException as error:
        if (told := _told(error)) is None:
            raise
        if "--debug" in arguments:
            talk("".join(traceback.format_exception(error)).rstrip())
        talk(f"exgrpo: {told[0]}")
        return told[1]
    if code == errors.EXIT_INTERRUPTED:
        # Typer turns a Ctrl-C inside a command into this code.
        talk("exgrpo: interrupted.")
    return code if isinstance(code, int) else 0


@contextmanager
def _warnings_as_lines(*, quiet: bool, debug: bool) -> Iterator[None]:
    """The toolkit's own warnings as one line each on stderr; those of other packages with `--debug` alone."""
    logging.setLogRecordFactory(PrintableRecord)
    if not debug and logging.lastResort is not None:
        # Loggers that nobody has set up warn through this one; torch's C++ code reads the variable when it is loaded.
        logging.lastResort.setLevel(logging.ERROR)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with warnings.catch_warnings():
        tell_warnings(lambda line, is_damage: talk(f"exgrpo: {line}", quiet=quiet and not is_damage), others=debug)
        yield


def _told(error: BaseException) -> tuple[str, int] | None:
    """The line for an error and the exit code; None for what ends a program without being an error."""
    said = _one_line(str(error))
    if isinstance(error, errors.ExgrpoError):
        return said, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted.", errors.EXIT_INTERRUPTED
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = errors.shown(str(error.filename))
        return f"{name} is longer than a name may be: choose a shorter one.", errors.EXIT_REFUSED
    if isinstance(error, OSError):
        said = f"{error.filename}: " * bool(error.filename) + f"{error.strerror or error}."
    elif errors.is_exhaustion(error):
        remedy = "free some, raise a limit (ulimit -v, -u), or use less. What was saved is whole."
        said = f"the system gave no more memory or threads ({said or type(error).__name__}): {remedy}"
    elif "(os error " in said:
        # So safetensors and tokenizers name what the system refused them, the room on a disk above all.
        said += ": make room, or choose another place. What was saved is whole."
    elif not isinstance(error, Exception):
        return None
    else:
        # What nobody foresaw: a line, not a traceback.
        said = f"unexpected {type(error).__name__}: {said} Run again with --debug to see where."
    return said, errors.EXIT_STOPPED


def _unknown_option(error: TyperException) -> str:
    """Message of an unknown option that means one of the command's, or a setting; empty for other errors."""
    name, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not isinstance(name, str) or context is None:
        return ""
    offered = {each for parameter in context.command.params for each in parameter.opts}
    found = [f"--{each}" for each in errors.alike(name.lstrip("-"), (each.lstrip("-") for each in offered))]
    if not found and "--set" in offered:
        from exgrpo_cli.config.settings import Config, flat

        found = [f"--set {key}=..." for key in errors.alike(name.lstrip("-"), flat(Config()))]
    return f"No such option: {name}. Did you mean {' or '.join(found)}?" if found else ""


def _with_value(error: TyperException) -> str:
    """Message of an error of usage; of a value that does not fit its option, with that value."""
    message = error.format_message().replace("Value error, ", "")
    message = re.sub(r"Got unexpected extra argument\S* ", "Too many arguments: ", message)
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    value = errors.shown(found[0]["input"]) if found else ""
    return message if value in message else re.sub(": (?:Input )?", lambda _: f": {value} ", message, count=1)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _help_line(arguments: Sequence[str]) -> str:
    names = {command.name for command in app.registered_commands}
    command = next((argument for argument in arguments if argument in names), None)
    return f"exgrpo {command} --help" if command else "exgrpo --help"
