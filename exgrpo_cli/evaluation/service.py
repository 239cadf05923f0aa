"""A whole evaluation as a user asks for it: benchmarks, a model, and what is to differ from the presets."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.base.errors import InputError, Interrupted
from exgrpo_cli.base.files import write_json
from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.evaluation.asking.models import ModelChoice, choose_model
from exgrpo_cli.evaluation.benchmarks.presets import (
    Benchmark,
    Suite,
    averages_over,
    benchmark_title,
    load_suite,
    own_benchmark,
)
from exgrpo_cli.evaluation.compare.paper_table import averages_of, by_second_grader, table_columns
from exgrpo_cli.evaluation.progress import EvaluationProgress
from exgrpo_cli.evaluation.results.folder import ResultsFolder
from exgrpo_cli.evaluation.results.stored import results_in
from exgrpo_cli.evaluation.scoring import open_pool, rescore, score_folder, write_tables
from exgrpo_cli.questions.sources.formats import stem_of

if TYPE_CHECKING:
    from exgrpo_cli.evaluation.asking.askers import Asker
    from exgrpo_cli.evaluation.session import BenchmarkSession

RESULTS = Path("results")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """What was asked for; None stands for the preset's choice."""

    benchmarks: tuple[str, ...]
    model: str | None = None
    output: Path | None = None
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """Values that replace the presets': samples, temperature, top_p, max_tokens, template."""
    seed: int = 0
    engine: str = "hf"
    endpoint: str | None = None
    data: Path | None = None
    second_graders: tuple[str, ...] = ()
    """Beside those that always stand beside the benchmark's own."""
    device: str = "auto"
    threads: int = 1
    deterministic: bool = False
    tensor_parallel: int = 1
    """GPUs that hold one vLLM engine together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """The request with everything looked up that can be without loading a model."""

    request: EvaluationRequest
    suite: Suite
    model: str
    """Name for tables."""
    choice: ModelChoice | None
    """None when a server answers."""
    folders: Mapping[str, Path]
    """Results folder of each benchmark."""
    summary_folder: Path
    """Where the table over all benchmarks goes; the benchmark's own folder when there is one."""

    def to_json(self) -> dict[str, Any]:
        """What `--dry-run --json` prints: the model, and the protocol and folder of each benchmark."""
        source = self.request.endpoint or (self.choice.config.backbone.source if self.choice else "")
        return {
            "model": {"name": self.model, "source": source},
            "benchmarks": {
                benchmark.name: {
                    "source": str(self.request.data) if self.request.data else benchmark.source.dataset,
                    "folder": str(self.folders[benchmark.name]),
                    **asdict(benchmark.protocol),
                }
                for benchmark in self.suite.benchmarks
            },
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """What an evaluation found."""

    model: str
    results: Mapping[str, Mapping[str, Any]]
    """Benchmark to what its `results.json` holds."""
    titles: Mapping[str, str]
    averages: Mapping[str, Mapping[str, Any]]
    """`value`, `low`, `high`, `benchmarks`, `pass_at_k` and `second_graders` of each, by the name of the set."""
    folder: Path
    """Where the tables are."""

    def to_json(self) -> dict[str, Any]:
        """Results by benchmark; `benchmark` repeats the only one, for scripts that need not know its name."""
        only = next(iter(self.results.values())) if len(self.results) == 1 else None
        alone = {} if only is None else {"benchmark": {"name": next(iter(self.results)), **only}}
        averages = {"averages": dict(self.averages)} if self.averages else {}
        return {**self.results, **alone, **averages}


def plan_evaluation(request: EvaluationRequest) -> EvaluationPlan:
    """Look up benchmarks, model and folders. Raises InputError naming what is unknown or contradicts itself."""
    suite = _suite(request)
    for grader in request.second_graders:
        # An unknown one is refused here, not after the sampling.
        open_pool(grader).close()
    if request.endpoint is not None:
        if request.model is None:
            raise InputError("--endpoint needs --model: the name under which the server serves it.")
        if request.deterministic:
            raise InputError("--deterministic needs a model loaded here: a server batches as it likes.")
        if request.tensor_parallel > 1:
            raise InputError("--tensor-parallel needs a model loaded here: a server is started with its own.")
        choice, name, file_name = None, request.model, request.model.replace("/", "--")
    else:
        choice = choose_model(request.model)
        name, file_name = choice.name, choice.file_name
    parent = request.output or RESULTS
    folders = {benchmark.name: parent / f"{benchmark.name}-{file_name}" for benchmark in suite.benchmarks}
    if len(folders) == 1 and request.output is not None:
        folders = dict.fromkeys(folders, request.output)
    summary = next(iter(folders.values())) if len(folders) == 1 else parent / f"{suite.name}-{file_name}"
    return EvaluationPlan(
        request=request, suite=suite, model=name, choice=choice, folders=folders, summary_folder=summary
    )


def evaluate(plan: EvaluationPlan, note: Callable[[str], None], *, quiet: bool) -> EvaluationReport:
    """Ask, grade and score everything that is planned, going on where an earlier call was interrupted.

    Raises InputError before work starts, RunError when it stops under way, Interrupted after Ctrl-C; finished questions
    are kept in each case.
    """
    asker = _open_asker(plan, note)
    try:
        # All of them first: a benchmark that cannot be had must not be found out about hours later.
        sessions = _prepare_all(plan, asker, note)
        results = {session.benchmark.name: _run(plan, session, asker, quiet=quiet) for session in sessions}
    finally:
        asker.close()
    averages = plan.suite.averages
    return _report(plan.model, results, averages, plan.summary_folder)


def _open_asker(plan: EvaluationPlan, note: Callable[[str], None]) -> "Asker":
    from exgrpo_cli.evaluation.asking.askers import EndpointAsker, LocalAsker
    from exgrpo_cli.evaluation.asking.endpoint import Endpoint, SparingNote

    request = plan.request
    if plan.choice is None:
        key = os.environ.get("OPENAI_API_KEY")
        url = str(request.endpoint)
        return EndpointAsker(Endpoint(url=url, model=plan.model, api_key=key, note=SparingNote(note)))
    return LocalAsker(
        plan.choice,
        engine=request.engine,
        device=request.device,
        threads=request.threads,
        deterministic=request.deterministic,
        tensor_parallel=request.tensor_parallel,
    )


def _prepare_all(plan: EvaluationPlan, asker: "Asker", note: Callable[[str], None]) -> list["BenchmarkSession"]:
    """Every benchmark; where some cannot be asked, one error that names them and those that can."""
    sessions: list[BenchmarkSession] = []
    failed: dict[str, InputError] = {}
    for benchmark in plan.suite.benchmarks:
        try:
            sessions.append(_prepare(plan, benchmark, asker, note))
        except InputError as error:
            failed[benchmark.name] = error
    if not failed:
        return sessions
    first = next(iter(failed.values()))
    if len(plan.suite.benchmarks) == 1:
        raise first
    able = " ".join(session.benchmark.name for session in sessions)
    raise InputError(
        f"{len(failed)} of {len(plan.suite.benchmarks)} benchmarks cannot be asked ({', '.join(failed)}). The first: "
        f"{first}" + (f" Those that can: exgrpo evaluate {able}" if able else "")
    ) from first


def _prepare(
    plan: EvaluationPlan, benchmark: Benchmark, asker: "Asker", note: Callable[[str], None]
) -> "BenchmarkSession":
    from exgrpo_cli.evaluation.benchmarks.questions import benchmark_questions
    from exgrpo_cli.evaluation.session import BenchmarkSession
    from exgrpo_cli.questions.question_file.choices import options_of

    questions = benchmark_questions(benchmark, plan.request.data)
    if not benchmark.source.dataset and all(options_of(question) for question in questions.questions):
        # A file of the user's own says by its options how it is to be graded.
        note(f"{benchmark.name}: multiple choice, options shuffled")
        benchmark = _override(benchmark, {"grader": "choice"})
        questions = benchmark_questions(benchmark, plan.request.data)
    unshuffled = len(questions.questions) - len(questions.options)
    if benchmark.protocol.grader == "choice" and unshuffled:
        note(
            f"{benchmark.name}: {unshuffled} of {len(questions.questions)} questions have no options that can be told "
            "from their text, or a gold that labels none: asked as they stand, graded by label alone"
        )
    if questions.num_folded:
        note(f"{benchmark.name}: {questions.num_folded} repeated rows folded into {len(questions.questions)} questions")
    samples = benchmark.protocol.samples
    # Who names a limit wants that limit; a preset's is the most that the model's window allows.
    prepared = asker.prepare(benchmark, questions.questions, fits_window="max_tokens" not in plan.request.protocol)
    if prepared.max_tokens < benchmark.protocol.max_tokens:
        note(
            f"{benchmark.name}: at most {prepared.max_tokens} new tokens instead of {benchmark.protocol.max_tokens}: "
            "the longest prompt and they fill the model's window"
        )
    return BenchmarkSession(
        benchmark=benchmark,
        questions=questions,
        prepared=prepared,
        seed=plan.request.seed,
        batch_questions=asker.batch_questions(samples) if plan.request.deterministic else None,
    )


def _run(plan: EvaluationPlan, session: "BenchmarkSession", asker: "Asker", *, quiet: bool) -> dict[str, Any]:
    name, total = session.benchmark.name, len(session.questions.questions)
    folder = ResultsFolder.create(plan.folders[name], session.stamp(asker), session.asked)
    with folder, open_pool(session.benchmark.protocol.grader) as pool:
        try:
            with EvaluationProgress(name, total, quiet=quiet) as progress:
                session.run(folder, pool, progress)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped; {len(folder.records())} of {total} questions of {name} are kept in {folder.path}: "
                "the same command goes on."
            ) from None
        return score_folder(folder, pool, plan.request.second_graders)


def rescore_stored(request: EvaluationRequest) -> EvaluationReport:
    """Grade stored samples again: those of `output` where it holds results, else those that the request would write."""
    output = request.output
    if output is not None and any((output / name).is_file() for name in ("protocol.json", "results.json")):
        return rescore_folders([result.path for result in results_in(output)], request.second_graders, output)
    if not request.benchmarks and request.data is None:
        raise InputError(
            "--rescore needs to know which samples: name their results folder with --output, or the BENCHMARK and "
            "--model that were evaluated."
        )
    plan = plan_evaluation(request)
    return rescore_folders(list(plan.folders.values()), request.second_graders, plan.summary_folder)


def rescore_folders(paths: Sequence[Path], second_graders: Sequence[str], summary_folder: Path) -> EvaluationReport:
    """Grade the stored samples of one model's results folders again and score them anew; needs no model.

    Raises InputError for a folder that is no results folder or is unfinished, and for one that names a function of the
    user as its grader: no evaluation of ours writes that, and whoever sent the folder would choose what runs here.
    """
    results: dict[str, dict[str, Any]] = {}
    models = []
    for path in paths:
        with ResultsFolder.open(path) as folder, open_pool(_stamped_grader(folder)) as pool:
            rescore(folder, pool)
            result = score_folder(folder, pool, second_graders)
            results[folder.stamp["benchmark"]["name"]] = result
            models.append(folder.stamp["model"]["name"])
    return _report(models[0], results, averages_over(results), summary_folder)


def _stamped_grader(folder: ResultsFolder) -> str:
    name = folder.stamp["grader"]["name"]
    if name.startswith(PREFIX):
        raise InputError(
            f"{folder.path} names the grader {name!r}, which would run code: if you trust it, evaluate with --grader."
        )
    return name


def _suite(request: EvaluationRequest) -> Suite:
    if request.benchmarks:
        suite = load_suite(request.benchmarks)
    elif request.data is not None:
        own = own_benchmark(stem_of(request.data))
        suite = Suite(name=own.name, benchmarks=(own,), averages={})
    else:
        raise InputError("name a BENCHMARK (`exgrpo presets` lists them), or give your own questions with --data FILE.")
    return replace(suite, benchmarks=tuple(_override(b, request.protocol) for b in suite.benchmarks))


def _override(benchmark: Benchmark, values: Mapping[str, Any]) -> Benchmark:
    return replace(benchmark, protocol=replace(benchmark.protocol, **values))


def _report(
    model: str, results: Mapping[str, Mapping[str, Any]], averages: Mapping[str, tuple[str, ...]], folder: Path
) -> EvaluationReport:
    titles = {name: benchmark_title(name) for name in results}
    report = EvaluationReport(
        model=model,
        results=results,
        titles=titles,
        averages=averages_of(results, averages),
        folder=folder,
    )
    folder.mkdir(parents=True, exist_ok=True)
    graded = {model: results, **{f"{model}, by {name}": found for name, found in by_second_grader(results).items()}}
    write_tables(folder, [(name, table_columns(found, titles, averages)) for name, found in graded.items()])
    if len(results) > 1:
        write_json(folder / "results.json", report.to_json())
    return report
