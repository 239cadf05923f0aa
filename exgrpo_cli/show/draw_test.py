"""Drawn against promised: a chi-square test of the question sampler over all draws of a run.

A draw spreads n questions over the non-empty buckets by a multinomial of the promised probabilities. What exceeds a
bucket's size goes elsewhere: draws in which that could happen are shown, and left out of the test. Axes: `cells` are
buckets, by success count and number of members; `draws` are the steps that drew.

The probabilities change from step to step, so Pearson's statistic over the totals is not chi-square distributed. We
use its general form: with d = sum over draws of (drawn - expected) and S the sum of the draws' covariances, d' S^+ d
has rank(S) degrees of freedom. For equal probabilities the two are the same number.
"""

from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.special import chdtrc

from exgrpo_cli.show.record import Columns, table_rows

Cells = Float64[np.ndarray, " cells"]
Square = Float64[np.ndarray, "cells cells"]

SMALLEST_EXPECTED = 5.0
"""Cells with fewer expected questions are pooled: the usual bound of the chi-square approximation."""


def draw_test(draws: Columns) -> dict[str, Any]:
    """Compare all draws of a run with their promise.

    Returns `chi_square`, `degrees_of_freedom`, `p_value` (None where the draws left nothing to chance, or without any)
    and `buckets`: questions `expected` and `drawn` of each `bucket`, by the `num_members` its success count is over.
    """
    if not draws.num_drawn.sum():
        return {"chi_square": 0.0, "degrees_of_freedom": 0, "p_value": None, "buckets": []}
    names, cells = np.unique(np.stack([draws.bucket, draws.num_members]), axis=1, return_inverse=True)
    steps, rows = np.unique(draws.step, return_inverse=True)
    shape = (len(steps), names.shape[1])
    probability, room, drawn = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    probability[rows, cells] = draws.probability
    room[rows, cells] = draws.num_questions
    drawn[rows, cells] = draws.num_drawn
    promised = probability / np.maximum(probability.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    num = drawn.sum(axis=1, keepdims=True)
    expected, fits = num * promised, ~((probability > 0) & (room < num)).any(axis=1)
    tested = expected[fits].sum(axis=0)
    covariance = np.diag(tested) - expected[fits].T @ promised[fits]
    chi_square, degrees = _statistic(drawn[fits].sum(axis=0) - tested, covariance, tested)
    return {
        "chi_square": chi_square,
        "degrees_of_freedom": degrees,
        "p_value": float(chdtrc(degrees, chi_square)) if degrees else None,
        "buckets": table_rows(bucket=names[0], num_members=names[1], expected=expected.sum(0), drawn=drawn.sum(0)),
    }


def _statistic(difference: Cells, covariance: Square, expected: Cells) -> tuple[float, int]:
    """d' S^+ d and rank(S), after pooling the cells that expect too little."""
    pool = _pooling(expected)
    difference, covariance = pool @ difference, pool @ covariance @ pool.T
    # Rounding can leave the variance of a count that cannot vary a little below 0.
    scale = np.sqrt(np.clip(np.diag(covariance), 0, None))
    free = scale > 1e-6 * max(float(scale.max(initial=0.0)), 1.0)
    if not free.any():
        return 0.0, 0
    scaled = difference[free] / scale[free]
    values, vectors = np.linalg.eigh(covariance[np.ix_(free, free)] / np.outer(scale[free], scale[free]))
    # The counts of a draw add up to n: one direction has no variance, which rounding leaves at about 1e-16.
    kept = values > 1e-6
    projected = vectors[:, kept].T @ scaled
    return float((projected**2 / values[kept]).sum()), int(kept.sum())


def _pooling(expected: Cells) -> Float64[np.ndarray, "pools cells"]:
    """A 0/1 matrix that joins cells, smallest first, until each pool expects at least SMALLEST_EXPECTED."""
    pool_of = np.zeros(len(expected), dtype=np.int64)
    pool, held = 0, 0.0
    for cell in np.argsort(expected, kind="stable"):
        pool_of[cell] = pool
        held += expected[cell]
        if held >= SMALLEST_EXPECTED:
            pool, held = pool + 1, 0.0
    return (np.arange(pool_of.max(initial=-1) + 1)[:, None] == pool_of).astype(np.float64)
