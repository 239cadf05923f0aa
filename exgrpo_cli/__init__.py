"""ExGRPO: reinforcement learning from verifiable rewards that replays its own correct reasoning (arXiv 2510.02245)."""

__version__ = "0.1.0"
