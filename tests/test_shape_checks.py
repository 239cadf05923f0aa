"""The suite checks declared shapes while it runs, in every worker process."""

import jaxtyping
import numpy as np
import pytest

from exgrpo_cli.algo.advantages import centred_advantages


def test_a_wrong_shape_is_refused_while_tests_run() -> None:
    """Rewards are one axis; a matrix would broadcast in silence."""
    with pytest.raises(jaxtyping.TypeCheckError, match="rewards"):
        centred_advantages(np.zeros((2, 2)))
