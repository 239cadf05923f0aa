"""What a step works with."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from exgrpo_cli.base.types import AnswerFormat, Question
from exgrpo_cli.config.settings import Config
from exgrpo_cli.engines.protocols import Generator, Policy
from exgrpo_cli.grading import GradingPool
from exgrpo_cli.models.load import Backbone
from exgrpo_cli.questions.stream import QuestionStream
from exgrpo_cli.ranks.ranks import ALONE, Ranks
from exgrpo_cli.replay.protocol import Buffer

Prompts = Mapping[str, Int32[np.ndarray, " prompt_tokens"]]
"""Token ids of each question's prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Everything a step works with."""

    config: Config
    questions: Mapping[str, Question]
    prompts: Prompts
    answer_format: AnswerFormat
    backbone: Backbone
    generator: Generator
    policy: Policy
    pool: GradingPool
    """This rank's own."""
    stream: QuestionStream
    buffer: Buffer
    rngs: Mapping[str, np.random.Generator]
    ranks: Ranks = ALONE
    """Engines, pool and buffer share their work by it; the step itself never asks."""
