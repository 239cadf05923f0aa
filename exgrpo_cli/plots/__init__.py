"""From a run folder to figures."""

from exgrpo_cli.plots.gallery import save_all

__all__ = ["save_all"]
