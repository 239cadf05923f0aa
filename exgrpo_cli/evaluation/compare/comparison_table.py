"""Models side by side for the terminal: scores, paired differences from the first model, and what chance explains."""

from rich.table import Table

from exgrpo_cli.evaluation.compare.side_by_side import AdjustedComparison, SideBySide
from exgrpo_cli.evaluation.compare.tables import measure

HEADS = ("benchmark", "model", "score", "95 % interval", "difference", "95 % interval", "p", "Holm", "won/lost", "n")


def comparison_table(compared: SideBySide) -> Table:
    """A row per benchmark and model; "won/lost" counts the questions that flipped."""
    table = Table(title=f"compared with {compared.models[0]}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("benchmark", "model") else "right", overflow="fold")
    for name, title in compared.titles.items():
        held = [model for model in compared.models if (model, name) in compared.scores]
        for model in held:
            score = compared.scores[model, name]
            table.add_row(
                f"{title} {measure(score.samples)}" if model == held[0] else "",
                model,
                f"{100 * score.value:.1f}",
                f"{100 * score.low:.1f} to {100 * score.high:.1f}",
                *_difference(compared.comparisons.get((model, name))),
                str(score.questions),
            )
    for model, averages in compared.average_scores().items():
        for name, found in averages.items():
            interval = f"{100 * found['low']:.1f} to {100 * found['high']:.1f}"
            table.add_row(f"Avg. {name}", model, f"{100 * found['value']:.1f}", interval, *[""] * 6)
    return table


def _difference(found: AdjustedComparison | None) -> list[str]:
    if found is None:
        return [""] * 5
    difference, flips = found.comparison.difference, found.comparison.flips
    won = sum(flip.second > flip.first for flip in flips)
    return [
        f"{100 * difference.value:+.1f}",
        f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}",
        f"{difference.p_value:.4f}",
        f"{found.p_holm:.4f}",
        f"{won}/{len(flips) - won}",
    ]
