"""`exgrpo evaluate`: score a model on benchmarks, or compare two results."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands import cli
from exgrpo_cli.config.requests import EvaluationRequest

if TYPE_CHECKING:
    from exgrpo_cli.evaluation.comparison import ResultTable
    from exgrpo_cli.evaluation.service import EvaluationReport


@cli.with_options
def evaluate(
    request: EvaluationRequest, speech: cli.Speech, rescore: bool = False, dry_run: bool = False, compare: bool = False
) -> None:
    """Score a model on benchmarks with intervals, resuming what was interrupted.

    \b
    Examples:
      exgrpo evaluate arithmetic
      exgrpo evaluate aime24 math500 --model Qwen/Qwen2.5-Math-1.5B
      exgrpo evaluate paper-id --samples 32 --model runs/mine
      exgrpo evaluate --compare results/aime24-before results/aime24-after
      exgrpo evaluate --compare results/a results/b results/c --output figures
    """
    from exgrpo_cli.evaluation import service
    from exgrpo_cli.machine.survey import choose_threads

    if compare:
        _compare([Path(folder) for folder in request.benchmarks], request.output, json=speech.json, quiet=speech.quiet)
        return
    request = replace(request, threads=choose_threads(0))
    if rescore:
        _show(service.rescore_stored(request), speech.json, speech.quiet)
        return
    plan = service.plan_evaluation(request)
    which = ", the newest finished run" if request.model is None else ""
    cli.talk(f"exgrpo: {', '.join(plan.folders)} with {plan.model}{which}", quiet=speech.quiet)
    if dry_run:
        cli.print_json(plan.to_json()) if speech.json else _print_plan(plan.to_json())
        return
    report = service.evaluate(plan, lambda text: cli.talk(text, quiet=speech.quiet), quiet=speech.quiet)
    _show(report, speech.json, speech.quiet)


def _print_plan(shown: Mapping[str, Any]) -> None:
    cli.write_data(f"model {shown['model']['name']} from {shown['model']['source']}")
    for name, settings in shown["benchmarks"].items():
        cli.write_data(f"{name}: " + ", ".join(f"{key} {value}" for key, value in settings.items()))


def _show(report: "EvaluationReport", json: bool, quiet: bool) -> None:
    """The score on stdout, the plot and the tables in the results folder."""
    from exgrpo_cli.base.reporter import make_reporter, print_table
    from exgrpo_cli.evaluation.comparison import score_table
    from exgrpo_cli.evaluation.results import ungraded

    titles = report.table.titles
    cli.print_json(report.to_json()) if json else print_table(score_table(report.table))
    # Last: where they cannot be written the score is known.
    with make_reporter(quiet=quiet) as reporter:
        reporter.phase("drawing the figures")
        _plot(report.table, report.folder)
    for name, result in report.results.items():
        if failures := ungraded(result):
            cli.talk(f"{titles[name]}: {failures}", quiet=quiet)
        for second, values in result.get("second_graders", {}).items():
            graders = f"{result['protocol']['grader']['name']} and the second grader {second}"
            cli.talk(f"{titles[name]}: {graders} differ on {values['disagreements']} samples", quiet=quiet)
    cli.talk(f"results in {report.folder}", quiet=quiet)


def _compare(folders: Sequence[Path], output: Path | None, *, json: bool, quiet: bool) -> None:
    """The comparison on stdout; with --output its figures, tables and plots as well.

    Of one comparison the questions that flipped are shown too.
    """
    from exgrpo_cli.base.files import require_writable, write_json, write_text
    from exgrpo_cli.evaluation.comparison import compare, markdown

    if len(folders) < 2 and not (folders and folders[0].is_dir()):
        raise InputError("--compare needs results folders: exgrpo evaluate --compare FOLDER FOLDER...")
    if output is not None:
        require_writable(output / "table.md")
        if (output / "protocol.json").exists():
            raise InputError(f"--output {output} holds results, whose table.md would be replaced: name another folder.")
    compared = compare(folders)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "comparison.json", compared.to_json())
        write_text(output / "table.md", markdown(compared))
        _plot(compared, output)
    if json:
        cli.print_json(compared.to_json())
    else:
        cli.write_data(f"{markdown(compared)}\n", end="")
        _print_differences(list(compared.comparisons.values()))
    where = f"figure and tables in {output}" if output else "with --output FOLDER, a figure and tables are written too"
    cli.talk(where, quiet=quiet)
    for note in compared.notes:
        cli.talk(f"note: {note}", quiet=quiet)


def _plot(table: "ResultTable", folder: Path) -> None:
    """Figures of all models and benchmarks in three formats: `accuracy`, and `pass-at-k` where some k is above 1."""
    from exgrpo_cli.evaluation.comparison import measure
    from exgrpo_cli.show.figures.comparisons import accuracy_by_benchmark, pass_at_k_curves
    from exgrpo_cli.show.figures.written import save

    found = [
        (model, title, results[name])
        for name, title in table.titles.items()
        for model, results in table.models.items()
        if name in results
    ]
    scores = [(model, f"{title}, {measure(each)}", {**each, "value": each["avg_at_k"]}) for model, title, each in found]
    curves = [(model, title, figures["pass_at_k"]) for model, title, figures in found if figures["k"] > 1]
    formats = ("png", "svg", "pdf")
    save(accuracy_by_benchmark(scores), folder, "accuracy", formats=formats)
    if curves:
        save(pass_at_k_curves(curves), folder, "pass-at-k", formats=formats)


def _print_differences(made: Sequence[Mapping[str, Any]]) -> None:
    """A line for every model and benchmark and one for each further k; of one comparison the questions that flipped."""
    for found in made:
        won = sum(flip["second"] > flip["first"] for flip in found["flips"])
        counts = f"{found['questions']} questions paired, {won} won and {len(found['flips']) - won} lost"
        models = f"{found['benchmark']}: {found['second']} minus {found['first']}"
        cli.write_data(f"{models}: {_difference(found)}, {found['p_holm']:.4f} adjusted, {counts}")
        for k, at_k in found["pass_at_k"].items():
            adjusted = f", {found['pass_p_holm']:.4f} adjusted" if k == max(found["pass_at_k"], key=int) else ""
            cli.write_data(f"  pass@{k}: {_difference(at_k)}{adjusted}")
        for flip in found["flips"] if len(made) == 1 else ():
            text = " ".join(flip["question"].split())
            cli.write_data(f"  {flip['first']:.2f} -> {flip['second']:.2f}  {flip['question_id']}  {text[:80]}")


def _difference(found: Mapping[str, Any]) -> str:
    difference, low, high = (f"{found[key]:+.3f}" for key in ("difference", "low", "high"))
    return f"{difference}, 95 % interval {low} to {high}, p = {found['p_value']:.4f}"
