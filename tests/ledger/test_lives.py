"""The life table of questions, counted by hand."""

import pyarrow as pa

from exgrpo_cli.ledger.lives import VISITED, question_lives


def test_questions_are_lost_and_regained_by_the_delay_between_their_visits() -> None:
    """a: never, solved, lost, still lost, regained 27 steps after it was; b: solved, kept, lost; c is never solved."""
    visits = [(1, "a", 0), (1, "b", 1), (2, "a", 2), (2, "b", 1), (3, "a", 0), (5, "b", 0), (8, "a", 0), (30, "a", 1)]
    visits += [(9, "c", 0), (10, "c", 0)]
    told = question_lives(pa.table(list(zip(*visits, strict=True)), names=VISITED))
    rows = {row.pop("delay"): tuple(row.values()) for row in told["by_delay"]}
    assert rows == {"1 to 4": (1, 2, 0, 0), "5 to 16": (0, 0, 0, 1), "17 to 64": (0, 0, 1, 0)}
    assert [told[name] for name in ("solved", "lost_now", "repair")] == [2, 1, 27.0]
    assert (told["lost_share"], told["regained_share"]) == (2 / 3, 1 / 2)
    nothing = question_lives(pa.table([[1], ["a"], [1]], names=VISITED).slice(0, 0))
    assert nothing["solved"] == 0 and nothing["lost_share"] is None and not nothing["by_delay"]
