"""ExGRPO: reinforcement learning from verifiable rewards that replays its own correct reasoning (arXiv 2510.02245).

From Python: `prepare`, `train`, `evaluate`, `open_run` and `Run`, which are imported when they are first used
(docs/python.md).
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["Run", "__version__", "evaluate", "open_run", "prepare", "train"]

if TYPE_CHECKING:
    from exgrpo_cli.api import Run, evaluate, open_run, prepare, train


def __getattr__(name: str) -> Any:
    """The names of `__all__`, so that importing the package stays light."""
    if name in __all__:
        from exgrpo_cli import api

        return getattr(api, name)
    raise AttributeError(f"module 'exgrpo_cli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
