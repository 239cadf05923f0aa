"""What marks the stored rows whose replay helped: numbers of entry 41 of the lab notebook.

    python docs/results/memories.py docs/results/memories/*.csv
    python docs/results/memories.py FOLDER/REGIME-* FORKS

The second writes the tables that the first reads, of runs FOLDER/REGIME-SEED, each of which has its forks in
FORKS/REGIME-SEED/forks.jsonl (`exgrpo fork RUN --output ...`).
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from exgrpo_cli.ledger.reader import LedgerReader

FEATURES = ("entropy", "advantage", "headroom", "age", "length", "rarity")
LEAST = 4
"""Rows of a step, of different values, that a correlation of ranks takes."""


def rows_of(run: Path, forks: Path) -> pd.DataFrame:
    """A row for each fork of a run: its step, the six features and the effect in nats."""
    made = pd.read_json(forks / run.name / "forks.jsonl", lines=True)
    bodies = LedgerReader(run / "replay").bodies(made.unit_id.tolist())
    # All rows stored are successes, whose advantage is positive: headroom is the mean of 1 - pi.
    made["headroom"] = [float(1 - np.exp(logprobs.astype(np.float64)).mean()) for _, logprobs in bodies]
    made["length"], made["rarity"], made["run"] = made.num_tokens, -made.k, run.name
    made["shown"] = (made.effect_logprob_low > 0) | (made.effect_logprob_high < 0)
    columns = ["run", "step", "unit_id", *FEATURES, "effect_logprob", "effect_pass_at_1", "drift", "shown"]
    return made[columns].sort_values(["step", "unit_id"])


def within_steps(rows: pd.DataFrame, name: str) -> pd.Series:
    """Spearman's correlation of a column with the effect in each forked step; NaN where either is constant."""

    def one(step: pd.DataFrame) -> float:
        known = step[[name, "effect_logprob"]].dropna()
        varied = len(known) >= LEAST and known.nunique().min() > 1
        return float(stats.spearmanr(known[name], known.effect_logprob).statistic) if varied else np.nan

    return rows.groupby(["run", "step"])[[name, "effect_logprob"]].apply(one).dropna()


def told(values: pd.Series) -> tuple[str, float]:
    """Mean with its 95 % interval by Student's t over steps, and the p-value of a mean of 0."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.sem()
    p_value = float(stats.ttest_1samp(values, 0).pvalue)
    return (
        f"{values.mean():+.3f} [{values.mean() - half:.3f}, {values.mean() + half:.3f}], {len(values)} steps",
        p_value,
    )


def ranked(rows: pd.DataFrame) -> pd.DataFrame:
    """Features and effect as ranks within their step, from -1 to 1; an unknown one is 0."""
    steps = rows.groupby(["run", "step"])[[*FEATURES, "effect_logprob"]]
    return (2 * (steps.rank() - 1) / (steps.transform("count") - 1).clip(lower=1) - 1).fillna(0.0)


def priority(fitted_on: pd.DataFrame, tested_on: pd.DataFrame) -> tuple[pd.Series, np.ndarray]:
    """Correlation within each step of `tested_on` of the effect with least squares of ranks, and their weights."""
    known = ranked(fitted_on)
    weights = np.linalg.lstsq(known[[*FEATURES]].to_numpy(), known.effect_logprob.to_numpy(), rcond=None)[0]
    guessed = tested_on.assign(priority=ranked(tested_on)[[*FEATURES]].to_numpy() @ weights)
    return within_steps(guessed, "priority"), weights


def tables_of(given: list[Path]) -> dict[str, pd.DataFrame]:
    """The rows of each regime, from its table, or from runs and the folder of their forks, of which tables are made."""
    if given[0].suffix == ".csv":
        return {path.stem: pd.read_csv(path) for path in given}
    *runs, forks = given
    found: dict[str, list[pd.DataFrame]] = {}
    for run in runs:
        found.setdefault(run.name.rpartition("-")[0], []).append(rows_of(run, forks))
    tables = {regime: pd.concat(rows) for regime, rows in found.items()}
    for regime, rows in tables.items():
        rows.to_csv(Path(__file__).parent / "memories" / f"{regime}.csv", index=False, float_format="%.6g")
    return tables


def main(given: list[str]) -> None:
    """Print the numbers of every regime."""
    found = tables_of([Path(each) for each in given])
    p_values: dict[tuple[str, str], float] = {}
    for regime, rows in found.items():
        means, helped = rows[["effect_logprob", "effect_pass_at_1", "drift"]].mean(), (rows.effect_logprob > 0).mean()
        print(f"{regime}: {len(rows)} rows of {rows.run.nunique()} runs, helped {helped:.3f}")
        print(
            f"  effect {means.effect_logprob:+.2e} nats, pass@1 {means.effect_pass_at_1:+.5f}, drift {means.drift:.2e}"
        )
        print(f"  own interval leaves out 0: {rows.shown.mean():.3f}")
        for name in FEATURES:
            text, p_values[regime, name] = told(within_steps(rows, name))
            print(f"  {name:10} {text}, p {p_values[regime, name]:.2g}")
        runs = sorted(rows.run.unique())
        half = [rows[rows.run.isin(part)] for part in (runs[: len(runs) // 2], runs[len(runs) // 2 :])]
        both = pd.concat([priority(half[0], half[1])[0], priority(half[1], half[0])[0]])
        print(f"  priority fitted on half of the runs, tested on the others: {told(both)[0]}")
        weights = dict(zip(FEATURES, priority(rows, rows)[1].round(3).tolist(), strict=True))
        print(f"  weights on all: {weights}")
        for other, theirs in found.items():
            if other != regime:
                print(f"  fitted on {other}: {told(priority(theirs, rows)[0])[0]}")
    ordered, bound = sorted(p_values, key=p_values.__getitem__), 0.0
    for place, key in enumerate(ordered):
        bound = max(bound, min(1.0, p_values[key] * (len(ordered) - place)))
        print(f"Holm: {' '.join(key)}: {bound:.2g}")


if __name__ == "__main__":
    main(sys.argv[1:])
