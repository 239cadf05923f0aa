"""Errors a user can act on, each with the exit code the command ends with.

Every message is one line that names the thing, its value, the bound and what to do next.
"""

from collections.abc import Iterable

from exgrpo_cli.base.data import tables

EXIT_DONE = 0
EXIT_STOPPED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class ExgrpoError(Exception):
    """Base of the toolkit's own errors: a command prints its message as one line and ends with `exit_code`."""

    exit_code = EXIT_STOPPED


class InputError(ExgrpoError, ValueError):
    """Error found before work started: in usage, input or environment."""

    exit_code = EXIT_REFUSED


class RunError(ExgrpoError, RuntimeError):
    """The work stopped under way; what was saved before stays valid."""


class Interrupted(ExgrpoError):
    """The user stopped the work (Ctrl-C or SIGTERM) and the state was saved."""

    exit_code = EXIT_INTERRUPTED


class ToolkitWarning(UserWarning):
    """Base of the toolkit's own warnings: the work goes on, and a command prints the message as one line."""


class DamageWarning(ToolkitWarning):
    """Something on disk is damaged or gone, and was passed over or left out; said with `--quiet` as well."""


_EXHAUSTED = ("can't start new thread", "create a primitive", "allocate memory", "memory allocation", "realloc of size")
"""One of these is in what libraries say when the system refuses them memory or threads."""


def is_exhaustion(error: BaseException) -> bool:
    """Whether the system refused memory or a thread, whatever the library that wanted it calls that.

    Rust's panic over a thread pool, which is no Exception, counts.
    """
    text = str(error)
    is_panic = type(error).__name__ == "PanicException" and "thread pool" in text
    return is_panic or isinstance(error, MemoryError) or any(words in text for words in _EXHAUSTED)


def alike(name: str, known: Iterable[str]) -> list[str]:
    """Those of the known names, `section.key` or `key`, whose key is that of `name` or has its meaning; those of its
    own section alone where there are any."""
    words, (section, _, word) = tables(__file__, "words.toml"), name.replace("-", "_").rpartition(".")
    found = [each for each in known if each.rpartition(".")[2].replace("-", "_") in (word, words["meant"].get(word))]
    return [each for each in found if each.rpartition(".")[0] == section] or found


def nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    """The hint of an unknown-name error: " Did you mean 'x'?" or, when nothing is near, the list of known names."""
    import difflib

    close = alike(name, known) or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def shown(value: object) -> str:
    """A value as an error shows it: on one line, not too long, whatever it is."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def first_line(error: BaseException) -> str:
    """Message of a library's error, without the pages some add to it; its type where there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
