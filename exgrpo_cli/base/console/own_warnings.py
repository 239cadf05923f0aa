"""The toolkit's own warnings as lines, wherever a process writes them."""

import warnings
from collections.abc import Callable
from typing import TextIO

from exgrpo_cli.base.errors import DamageWarning, ToolkitWarning


def tell_warnings(say: Callable[[str, bool], None], *, others: bool) -> None:
    """From here on each of the toolkit's warnings is one call `say(line, is_damage)`.

    Those of other packages are shown as before where `others`, else not at all.
    """
    show = warnings.showwarning

    def show_line(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, ToolkitWarning):
            say(" ".join(str(message).split()), issubclass(category, DamageWarning))
        elif others:
            show(message, category, filename, lineno, file, line)

    warnings.simplefilter("always", ToolkitWarning)
    warnings.showwarning = show_line
