"""`exgrpo evaluate`: score a model on benchmarks, or compare two results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.commands.options import DryRunOption, Speech, presets_of, print_json, talk, with_groups, write_data

if TYPE_CHECKING:
    from exgrpo_cli.base.statistics import Score
    from exgrpo_cli.evaluation.compare.comparison import Comparison
    from exgrpo_cli.evaluation.service import EvaluationPlan, EvaluationReport, EvaluationRequest


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """The model and what differs from the benchmarks' own protocol; None leaves it to them."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Run folder (RUN@step-000050, RUN@best, RUN@latest), model folder, GGUF file, hub id or preset.",
            show_default="the newest finished run",
        ),
    ] = None
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Questions instead of the benchmark's own.")] = None
    samples: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Samples per question.", show_default="the benchmark's")
    ] = None
    temperature: Annotated[float | None, typer.Option(help="T.", show_default="the benchmark's, mostly 0.6")] = None
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus.", show_default="1")] = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="New tokens at most.", show_default="the benchmark's, mostly 8192")
    ] = None
    template: Annotated[
        str | None,
        typer.Option(
            help="Prompt template.",
            show_default="a run's or a backbone preset's own; else the chat template of the model or the server",
        ),
    ] = None
    grader: Annotated[
        list[str] | None,
        typer.Option(help="Another grader beside math and oat: choice, exact or python:module:function; repeatable."),
    ] = None
    engine: Annotated[Literal["hf", "vllm"], typer.Option(help="Engine of a model loaded here.")] = "hf"
    tensor_parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="GPUs that share one model, with --engine vllm.")
    ] = 1
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="OpenAI-compatible server that serves --model.")
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model is loaded.")] = "auto"
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Results folder.", show_default="results/<benchmark>-<model>")
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Fixed batches: resumed or not, bit for bit the same.")
    ] = False

    def protocol(self) -> dict[str, Any]:
        """What replaces the presets' values."""
        names = ("samples", "temperature", "top_p", "max_tokens", "template")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def request(self, benchmarks: Sequence[str]) -> "EvaluationRequest":
        """The options as the core takes them."""
        from exgrpo_cli.evaluation.service import EvaluationRequest
        from exgrpo_cli.machine.threads import choose_threads

        return EvaluationRequest(
            benchmarks=tuple(benchmarks),
            model=self.model,
            output=self.output,
            protocol=self.protocol(),
            seed=self.seed,
            engine=self.engine,
            endpoint=self.endpoint,
            data=self.data,
            second_graders=tuple(self.grader or ()),
            device=self.device,
            threads=choose_threads(0),
            deterministic=self.deterministic,
            tensor_parallel=self.tensor_parallel,
        )

    def refuse_beside_compare(self) -> None:
        """Raise InputError for an option that a comparison of finished results does not look at."""
        for field in fields(self):
            if field.name != "output" and getattr(self, field.name) not in (field.default, []):
                refuse_beside_compare(field.name)


@with_groups
def evaluate(
    benchmarks: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BENCHMARK",
            help="arithmetic, aime24, math500, ...; paper, paper-id or paper-ood; folders with --compare.",
            autocompletion=presets_of("benchmarks", others=("paper", "paper-id", "paper-ood")),
        ),
    ] = None,
    *,
    options: EvaluateOptions,
    speech: Speech,
    rescore: Annotated[bool, typer.Option("--rescore", help="Grade stored samples again, without a model.")] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Compare stored results, question by question: --compare FOLDER FOLDER..."),
    ] = False,
    dry_run: DryRunOption = False,
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
    from exgrpo_cli.evaluation.service import rescore_stored

    if compare:
        options.refuse_beside_compare()
        for name, given in {"rescore": rescore, "dry_run": dry_run}.items():
            if given:
                refuse_beside_compare(name)
        _compare([Path(folder) for folder in benchmarks or ()], options.output, json=speech.json, quiet=speech.quiet)
        return
    request = options.request(benchmarks or ())
    report = rescore_stored(request) if rescore else _evaluate(request, speech, dry_run=dry_run)
    if report is not None:
        _show(report, speech.json, speech.quiet)


def _evaluate(request: "EvaluationRequest", speech: Speech, *, dry_run: bool) -> "EvaluationReport | None":
    from exgrpo_cli.evaluation.service import evaluate, plan_evaluation

    plan = plan_evaluation(request)
    which = ", the newest finished run" if request.model is None else ""
    talk(f"exgrpo: {', '.join(plan.folders)} with {plan.model}{which}", quiet=speech.quiet)
    if dry_run:
        _print_plan(plan, speech.json)
        return None
    return evaluate(plan, lambda text: talk(text, quiet=speech.quiet), quiet=speech.quiet)


def _print_plan(plan: "EvaluationPlan", json: bool) -> None:
    if json:
        print_json(plan.to_json())
        return
    shown = plan.to_json()
    write_data(f"model {shown['model']['name']} from {shown['model']['source']}")
    for name, settings in shown["benchmarks"].items():
        write_data(f"{name}: " + ", ".join(f"{key} {value}" for key, value in settings.items()))


def _show(report: "EvaluationReport", json: bool, quiet: bool) -> None:
    """The score on stdout, the plot and the tables in the results folder."""
    from exgrpo_cli.base.console.tables import print_table
    from exgrpo_cli.evaluation.compare.terminal_tables import score_table
    from exgrpo_cli.evaluation.scoring import ungraded
    from exgrpo_cli.plots.evaluation import accuracy_by_level, level_scores
    from exgrpo_cli.plots.style import save

    scores = [
        (report.model, {**result, "value": result["avg_at_k"], "samples": result["k"]}, report.titles[name])
        for name, result in report.results.items()
    ]
    _plot(scores, report.folder)
    _plot_curves(
        [(report.model, report.titles[name], result["pass_at_k"]) for name, result in report.results.items()],
        report.folder,
    )
    if levels := level_scores(report.results, report.titles):
        save(accuracy_by_level(levels), report.folder, "accuracy-levels")
    if json:
        print_json(report.to_json())
    else:
        print_table(score_table(report.model, report.results, report.titles, report.averages))
    for name, result in report.results.items():
        failures = ungraded(result)
        if failures:
            talk(f"{report.titles[name]}: {failures}", quiet=quiet)
        for second, values in result.get("second_graders", {}).items():
            graders = f"{result['protocol']['grader']['name']} and {second}"
            where = ", listed in its disagreements.jsonl" if values["disagreements"] else ""
            talk(f"{report.titles[name]}: {graders} part on {values['disagreements']} samples{where}", quiet=quiet)
    talk(f"results in {report.folder}", quiet=quiet)


def refuse_beside_compare(name: str) -> None:
    """Raise InputError naming the option."""
    option = name.replace("_", "-")
    raise InputError(f"--{option} does nothing beside --compare, which reads finished results: leave it out.")


def _compare(folders: Sequence[Path], output: Path | None, *, json: bool, quiet: bool) -> None:
    """The comparison on stdout; with --output its figures, tables and a plot as well."""
    from exgrpo_cli.base.files import write_json
    from exgrpo_cli.evaluation.compare.comparison import compare_folders

    if len(folders) < 2 and not (folders and folders[0].is_dir()):
        raise InputError("--compare needs results folders: exgrpo evaluate --compare FOLDER FOLDER...")
    if len(folders) != 2 or not all((folder / "protocol.json").is_file() for folder in folders):
        _compare_models(folders, output, json=json, quiet=quiet)
        return
    comparison = compare_folders(folders[0], folders[1])
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "comparison.json", comparison.to_json())
        names = (comparison.first, comparison.second)
        _plot(
            [(*pair, comparison.benchmark) for pair in zip(names, map(asdict, comparison.scores), strict=True)], output
        )
        curves = zip(names, map(_points, comparison.curves), strict=True)
        _plot_curves([(model, comparison.benchmark, points) for model, points in curves], output)
    print_json(comparison.to_json()) if json else _print_comparison(comparison)


def _compare_models(folders: Sequence[Path], output: Path | None, *, json: bool, quiet: bool) -> None:
    from exgrpo_cli.base.console.tables import print_table
    from exgrpo_cli.base.files import write_json
    from exgrpo_cli.evaluation.compare.side_by_side import side_by_side
    from exgrpo_cli.evaluation.compare.terminal_tables import comparison_table
    from exgrpo_cli.evaluation.scoring import write_tables

    compared = side_by_side(folders)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "comparison.json", compared.to_json())
        write_tables(output, compared.rows(), compared.footnote)
        scores = {(model, name): asdict(score) for (model, name), score in compared.scores.items()}
        _plot(
            [
                (model, scores[model, name], title)
                for name, title in compared.titles.items()
                for model in compared.models
                if (model, name) in scores
            ],
            output,
        )
        _plot_curves(
            [(model, compared.titles[name], _points(curve)) for (model, name), curve in compared.curves.items()], output
        )
    if json:
        print_json(compared.to_json())
    else:
        print_table(comparison_table(compared))
    where = f"figure and tables in {output}" if output else "with --output FOLDER, a figure and tables are written too"
    talk(where, quiet=quiet)
    for note in compared.notes:
        talk(f"note: {note}", quiet=quiet)


def _plot(scores: Sequence[tuple[str, Mapping[str, Any], str]], folder: Path) -> None:
    """(model, score with its interval, benchmark) as a figure, `accuracy` in three formats."""
    from exgrpo_cli.evaluation.compare.terminal_tables import measure
    from exgrpo_cli.plots.evaluation import BenchmarkScore, accuracy_by_benchmark
    from exgrpo_cli.plots.style import save

    points = [
        BenchmarkScore(
            model=model,
            benchmark=f"{benchmark}\n{measure(score['samples'])}",
            value=score["value"],
            low=score["low"],
            high=score["high"],
        )
        for model, score, benchmark in scores
    ]
    save(accuracy_by_benchmark(points), folder, "accuracy", formats=("png", "svg", "pdf"))


def _points(curve: "Mapping[int, Score]") -> dict[str, Any]:
    return {str(k): asdict(score) for k, score in curve.items()}


def _plot_curves(curves: Sequence[tuple[str, str, Mapping[str, Mapping[str, float]]]], folder: Path) -> None:
    """(model, benchmark, pass@k by k) as a figure, `pass-at-k` in three formats; nothing where k is 1 throughout."""
    from exgrpo_cli.plots.coverage import PassCurve, pass_at_k_curves
    from exgrpo_cli.plots.style import save

    drawn = [
        PassCurve(
            model=model,
            benchmark=benchmark,
            points={int(k): (found["value"], found["low"], found["high"]) for k, found in by_k.items()},
        )
        for model, benchmark, by_k in curves
        if len(by_k) > 1
    ]
    if drawn:
        save(pass_at_k_curves(drawn), folder, "pass-at-k", formats=("png", "svg", "pdf"))


def _print_comparison(comparison: "Comparison") -> None:
    difference = comparison.difference
    write_data(
        f"{comparison.benchmark}: {comparison.second} minus {comparison.first}: {100 * difference.value:+.1f} points, "
        f"95 % interval {100 * difference.low:+.1f} to {100 * difference.high:+.1f}, p = {difference.p_value:.4f}, "
        f"{difference.questions} questions paired"
    )
    for k, at_k in comparison.pass_at_k.items():
        write_data(
            f"  pass@{k}: {100 * at_k.value:+.1f} points, 95 % interval {100 * at_k.low:+.1f} to "
            f"{100 * at_k.high:+.1f}, p = {at_k.p_value:.4f}"
        )
    for grader, (first, second, found) in comparison.by_second_grader.items():
        write_data(
            f"  by {grader}: {100 * first:.1f} and {100 * second:.1f}, {100 * found.value:+.1f} points, 95 % interval "
            f"{100 * found.low:+.1f} to {100 * found.high:+.1f}, p = {found.p_value:.4f}"
        )
    for flip in comparison.flips:
        text = " ".join(flip.text.split())
        write_data(f"  {flip.first:.2f} -> {flip.second:.2f}  {flip.question_id}  {text[:80]}")
    for note in comparison.notes:
        talk(f"note: {note}")
