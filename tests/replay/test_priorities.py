"""What units weigh, by hand."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from exgrpo_cli.base.errors import InputError, RunError
from exgrpo_cli.config.names import replay_function
from exgrpo_cli.replay.append import Append
from exgrpo_cli.replay.by_unit import PRIORITIES, UnitDraw, foremost, token_drift, token_headroom
from exgrpo_cli.replay.rows import ROW, Rows


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def weight(name: str, rewards: list[float], step: int = 3) -> float:
    own = np.array(rewards, dtype=np.float64)
    return PRIORITIES[name](step, own, own - own.mean(), [logs(0.5)] * len(rewards))


def test_headroom_is_what_each_token_can_still_move() -> None:
    # A > 0: pi .2 and .6 leave .8 and .4; A < 0: pi .9 leaves .9. Mean over the three tokens: 2.1 / 3.
    assert token_headroom([logs(0.2, 0.6), logs(0.9)], np.array([0.5, -0.5])) == pytest.approx(0.7, rel=1e-6)
    # A row without advantage counts its tokens, at 0: 2.1 / 4.
    rows = [logs(0.2, 0.6), logs(0.9), logs(0.3)]
    assert token_headroom(rows, np.array([0.5, -0.5, 0.0])) == pytest.approx(2.1 / 4, rel=1e-6)


def test_drift_is_the_mean_square_of_log_ratios() -> None:
    # (0.01 + 0.04 + 0) / 3, over the tokens of both rows.
    birth = [np.zeros(2, dtype=np.float32), np.zeros(1, dtype=np.float32)]
    now = [np.array([0.1, -0.2], dtype=np.float32), np.zeros(1, dtype=np.float32)]
    assert token_drift(now, birth) == pytest.approx(0.05 / 3, rel=1e-6)


def test_headroom_moves_by_no_more_than_the_root_of_the_drift() -> None:
    """|pi - pi'| <= |log pi - log pi'| for probabilities, and means of squares bound squares of means."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        birth = [np.log(rng.uniform(0.01, 1.0, rng.integers(1, 9))).astype(np.float32) for _ in range(4)]
        now = [np.minimum(row + rng.normal(0, 0.3, len(row)), 0).astype(np.float32) for row in birth]
        advantages = rng.normal(size=4)
        moved = abs(token_headroom(now, advantages) - token_headroom(birth, advantages))
        assert moved <= np.sqrt(token_drift(now, birth)) + 1e-6


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("uniform", [1, 0, 0, 0], 1.0),
        ("latest", [1, 0, 0, 0], 3.0),
        # |A| .75 and .25 three times.
        ("advantage", [1, 0, 0, 0], 1.5 / 4 + 1e-6),
        ("reward", [1, 0, 0, 0], 0.25 + 1e-6),
        # k = 2: sum |A| 2, sd .577; k = 1: 1.5 and .5.
        ("signal", [1, 1, 0, 0], 2 * np.sqrt(1 / 3)),
        ("signal", [1, 0, 0, 0], 1.5 * 0.5),
        ("signal", [0, 0, 0, 0], 0.0),
    ],
)
def test_priorities_by_hand(name: str, rewards: list[float], expected: float) -> None:
    assert weight(name, rewards) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "draw", "message"),
    [
        ("[1.0]", "proportional", r"gave numbers of shape \(1,\) for 4, unit 0 of question q0 first; it must"),
        ("[1.0, float('nan'), 1, 1]", "top", "gave nan for unit 1 of question q0; it must be finite, or -inf for what"),
        ("[-1.0, 1, 1, 1]", "proportional", "gave -1.0 for unit 0 of question q0; it must be finite and at least 0"),
        ("['high'] * 4", "proportional", "gave no numbers .*; it must return one for each"),
        ("[1, 1, 1, float('inf')]", "proportional", "gave inf for unit 3"),
        ("[-1, float('-inf'), -2, -3]", "top", ""),
    ],
)
def test_a_priority_of_ones_own_must_keep_its_promises(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, given: str, draw: str, message: str
) -> None:
    """At the top priorities may be negative, and -inf is never drawn."""
    (workdir / "weighs.py").write_text(f"def f(units, rng):\n    return {given}\n")
    monkeypatch.delitem(sys.modules, "weighs", raising=False)
    rows = {name: np.zeros(4, dtype=kind) for name, kind in ROW.items()}
    place = Append(store="all", priority="python:weighs:f", draw=draw, capacity=9)

    def drawn() -> list[int]:
        made = UnitDraw(place, Rows(rows, 1), np.arange(4), np.array(["q0"], dtype=object), 1, np.random.default_rng(0))
        return [unit.unit_id for unit in made.take(9)]

    if message:
        with pytest.raises(RunError, match=message):
            drawn()
    else:
        assert drawn() == [0, 2, 3]


def test_what_a_function_of_ones_own_raises_is_named(workdir: Path) -> None:
    """Setting, function, what it was asked and the line that raised; also where the module itself raises."""
    (workdir / "raises.py").write_text("import numpy\ndef rare(units, rng):\n    return numpy.linalg.inv([[0]])\n")
    (workdir / "broken.py").write_text("def rare(units, rng):\n    return units.k\nlimit = 1 / 0\n")
    said = "replay.priority = 'python:raises:rare', asked for the priority of 2 units, raised LinAlgError: "
    with pytest.raises(RunError, match=rf"^{re.escape(said)}.*raises.py, line 3\); mend it$"):
        replay_function("replay.priority", "python:raises:rare")([1, 2], np.random.default_rng(0))
    said = "replay.metric = 'python:broken:rare': importing broken raised ZeroDivisionError: "
    with pytest.raises(InputError, match=rf"^{re.escape(said)}.*broken.py, line 3\); mend it$"):
        replay_function("replay.metric", "python:broken:rare")


@pytest.mark.parametrize("num", [0, 1, 7, 30, 99])
def test_the_foremost_are_those_of_a_plain_sort(num: int) -> None:
    """Few different keys and births, so that ties go on to the last rank."""
    rng = np.random.default_rng(num)
    keys, born = rng.integers(0, 3, 50).astype(float), rng.integers(0, 3, 50)
    expected = sorted(range(50), key=lambda i: (-keys[i], -born[i], i))[:num]
    assert foremost((keys, born), num).tolist() == expected
