"""The names that settings accept are exactly the rules that the replay room implements."""

import numpy as np
import pytest

from exgrpo_cli.config import names
from exgrpo_cli.replay.drawing.sampling import resolve_sampler
from exgrpo_cli.replay.drawing.selection import METRICS
from exgrpo_cli.replay.eviction import EVICTIONS


def test_every_metric_and_eviction_of_the_settings_is_implemented_and_no_other() -> None:
    assert tuple(METRICS) == names.METRICS
    assert tuple(EVICTIONS) == names.EVICTIONS


@pytest.mark.parametrize("name", names.SAMPLERS)
def test_every_sampler_of_the_settings_draws(name: str) -> None:
    assert resolve_sampler(name, 0.5, 0.125)([], 0, np.random.default_rng(0)) is not None
