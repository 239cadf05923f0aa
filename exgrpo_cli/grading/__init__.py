"""From response text to verdict: graders and the killable workers that run them."""

from exgrpo_cli.grading.extract import answer_text, last_boxed
from exgrpo_cli.grading.pool import GradingPool
from exgrpo_cli.grading.routes import GradingItem

__all__ = ["GradingItem", "GradingPool", "answer_text", "last_boxed"]
