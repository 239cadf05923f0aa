"""A whole evaluation as a user asks for it: benchmarks, a model, and values that replace the presets'.

One benchmark goes from its first sample to its last record through any number of interruptions.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from exgrpo_cli.base.errors import InputError, Interrupted
from exgrpo_cli.base.files import write_text
from exgrpo_cli.base.reporter import Reporter, make_reporter
from exgrpo_cli.base.types import SamplingParams
from exgrpo_cli.config.names import PREFIX
from exgrpo_cli.config.requests import EvaluationRequest
from exgrpo_cli.evaluation import comparison, exchange, models, sampling
from exgrpo_cli.evaluation.benchmarks import Benchmark, benchmark_questions, load_benchmarks, own_benchmark, title_of
from exgrpo_cli.evaluation.results import ResultsFolder, Stamp, environment, grader_version, rescore, score_folder
from exgrpo_cli.evaluation.server import Endpoint, throttled
from exgrpo_cli.questions import choices, files, question_file

if TYPE_CHECKING:
    from exgrpo_cli.evaluation.local import LocalModel

    Asker = LocalModel | Endpoint

RESULTS = Path("results")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """The request with everything looked up that can be without loading a model."""

    request: EvaluationRequest
    benchmarks: Mapping[str, Benchmark]
    """By name, or as `NAME@T` where several temperatures are asked for."""
    model: str
    """Name for tables."""
    choice: models.ModelChoice | None
    """None when a server answers."""
    folders: Mapping[str, Path]
    """Results folder of each benchmark."""
    summary_folder: Path
    """Folder of the table over all benchmarks; the benchmark's own folder when there is one."""

    def to_json(self) -> dict[str, Any]:
        """The object that `--dry-run --json` prints: the model, and the protocol and folder of each benchmark."""
        request, benchmarks = self.request, {}
        for name, each in self.benchmarks.items():
            source = str(request.data) if request.data else each.source.dataset
            benchmarks[name] = {"source": source, "folder": str(self.folders[name])} | asdict(each.protocol)
        source = request.endpoint or (self.choice.config.backbone.source if self.choice else "")
        return {"model": {"name": self.model, "source": source}, "benchmarks": benchmarks}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """Results of one model, and its tables' folder."""

    table: comparison.ResultTable
    folder: Path

    @property
    def results(self) -> Mapping[str, Mapping[str, Any]]:
        """Benchmark to what its `results.json` holds."""
        return next(iter(self.table.models.values()))

    def to_json(self) -> dict[str, Any]:
        """Results by benchmark; `benchmark` repeats the only one, for scripts that need not know its name."""
        found = dict(self.results)
        if len(found) == 1:
            ((name, result),) = found.items()
            found["benchmark"] = {"name": name, **result}
        averages = self.table.averages(next(iter(self.table.models)))
        return found | ({"averages": averages} if averages else {})


def plan_evaluation(request: EvaluationRequest) -> EvaluationPlan:
    """Look up benchmarks, model and folders. Raises InputError naming what is unknown or contradicts itself."""
    if request.benchmarks:
        benchmarks, suite = load_benchmarks(request.benchmarks), "-".join(request.benchmarks)
    elif request.data is not None:
        benchmarks, suite = (own_benchmark(files.stem_of(request.data)),), files.stem_of(request.data)
    else:
        raise InputError("name a BENCHMARK (`exgrpo presets` lists them), or give your own questions with --data FILE.")
    temperatures = np.atleast_1d(request.protocol.get("temperature", [])).tolist()
    ways = [dict(request.protocol) | {"temperature": each} for each in temperatures] or [dict(request.protocol)]
    asked = {
        benchmark.name if len(ways) == 1 else f"{benchmark.name}@{way['temperature']:g}": _override(benchmark, way)
        for benchmark in benchmarks
        for way in ways
    }
    for grader in request.second_graders:
        # An unknown one is refused here, not after the sampling.
        sampling.open_pool(grader).close()
    if request.endpoint is not None:
        if request.model is None:
            raise InputError("--endpoint needs --model: the name under which the server serves it.")
        if request.tensor_parallel > 1:
            raise InputError("--tensor-parallel needs a model loaded here: a server is started with its own.")
        exchange.checked_address(request.endpoint)
        choice, name = None, request.model
    else:
        if request.timeout is not None:
            raise InputError("--timeout is for the answers of --endpoint: leave it out.")
        choice = models.choose_model(request.model)
        name = choice.name
    file_name = re.sub(r"[^A-Za-z0-9._@+-]+", "--", name).strip("-.")
    parent = request.output or RESULTS
    folders = {name: parent / f"{name}-{file_name}" for name in asked}
    summary = parent / f"{suite}-{file_name}"
    if len(folders) == 1:
        summary = request.output or next(iter(folders.values()))
        folders = dict.fromkeys(folders, summary)
    for folder in folders.values():
        ResultsFolder.check_place(folder)
    return EvaluationPlan(
        request=request, benchmarks=asked, model=name, choice=choice, folders=folders, summary_folder=summary
    )


def evaluate(plan: EvaluationPlan, note: Callable[[str], None], *, quiet: bool) -> EvaluationReport:
    """Ask, grade and score everything that is planned, going on where an earlier call was interrupted.

    Raises InputError before work starts, RunError when it stops under way, Interrupted after Ctrl-C; finished questions
    are kept in each case.
    """
    with make_reporter(quiet=quiet) as reporter:
        reporter.phase(f"preparing {', '.join(plan.folders)} and {plan.model}")
        with closing(_open_asker(plan, note)) as asker:
            # All of them first: a benchmark that cannot be had must not be found out about hours later.
            prepared = {name: _prepare(plan.request, each, asker, note) for name, each in plan.benchmarks.items()}
            results = {name: _run(plan, name, *ready, reporter) for name, ready in prepared.items()}
    return _report(plan.model, results, plan.summary_folder)


def _open_asker(plan: EvaluationPlan, note: Callable[[str], None]) -> "Asker":
    request = plan.request
    if plan.choice is None:
        key, url = os.environ.get("OPENAI_API_KEY"), str(request.endpoint)
        waits: dict[str, Any] = {} if request.timeout is None else {"timeout_seconds": request.timeout}
        endpoint = Endpoint(url=url, model=plan.model, api_key=key, note=throttled(note), **waits)
        endpoint.check()
        return endpoint
    from exgrpo_cli.evaluation.local import LocalModel

    names = ("engine", "device", "threads", "tensor_parallel")
    return LocalModel(plan.choice, **{name: getattr(request, name) for name in names})


def _prepare(
    request: EvaluationRequest, benchmark: Benchmark, asker: "Asker", note: Callable[[str], None]
) -> tuple[Benchmark, sampling.Prepared, Stamp]:
    """A benchmark prepared for a model, and all that the score will depend on.

    Raises InputError where it cannot be had or asked.
    """
    name, questions = benchmark.name, benchmark_questions(benchmark, request.data)
    if not benchmark.source.dataset and all(choices.options_of(question) for question in questions.questions):
        # A file of the user's own says by its options how it is to be graded.
        note(f"{name}: multiple choice, options shuffled")
        benchmark = _override(benchmark, {"grader": "choice"})
        questions = benchmark_questions(benchmark, request.data)
    total, protocol = len(questions.records), benchmark.protocol
    unshuffled = sum(record.options is None for record in questions.records)
    if protocol.grader == "choice" and unshuffled:
        lack = "have no options that can be told from their text, or a gold that labels none"
        note(f"{name}: {unshuffled} of {total} questions {lack}: asked as they stand, graded by label alone")
    if questions.num_folded:
        note(f"{name}: {questions.num_folded} repeated rows folded into {total} questions")
    prepared = asker.prepare(name, protocol, questions.records)
    if prepared.max_tokens < protocol.max_tokens:
        most = f"{prepared.max_tokens} new tokens instead of {protocol.max_tokens}"
        note(f"{name}: at most {most}: the longest prompt and they fill the model's window")
    stamp = {
        "benchmark": {
            "name": name,
            "origin": questions.origin,
            "questions": total,
            "content_hash": question_file.content_hash(questions.questions),
            "folded_rows": questions.num_folded,
            "shuffle_seed": protocol.shuffle_seed,
        },
        "prompt": {"template": prepared.template, **asdict(prepared.answer_format)},
        "sampling": {
            **{key: getattr(protocol, key) for key in ("samples", "temperature", "top_p")},
            "max_tokens": prepared.max_tokens,
            "seed": request.seed,
        },
        "grader": {"name": protocol.grader, "version": grader_version(protocol.grader)},
        **asker.stamp(),
        "environment": environment(),
    }
    return benchmark, prepared, stamp


def _run(
    plan: EvaluationPlan, name: str, benchmark: Benchmark, prepared: sampling.Prepared, stamp: Stamp, reporter: Reporter
) -> dict[str, Any]:
    """Ask what the folder does not hold yet, each finished question on disk at once, and score it."""
    protocol, records = benchmark.protocol, prepared.records
    params = SamplingParams(temperature=protocol.temperature, top_p=protocol.top_p, max_new_tokens=prepared.max_tokens)
    total, opened = len(records), ResultsFolder.create(plan.folders[name], stamp, records)
    with opened as folder, sampling.open_pool(protocol.grader) as pool:
        finished = folder.records()
        left = [record for record in records if record.question.id not in finished]
        done = total - len(left)
        try:
            if 0 < done < total:
                reporter.note(f"{name}: going on after {done} of {total} questions")
            if left:
                with reporter.showing(f"loading {plan.model}"):
                    respond = prepared.open()
                began = time.monotonic()
                evaluation = sampling.sample_and_grade(
                    left,
                    respond,
                    pool=pool,
                    answer_format=prepared.answer_format,
                    params=params,
                    samples=protocol.samples,
                    seed=plan.request.seed,
                    on_record=lambda record: folder.append([record]),
                    on_sampled=reporter.sampling(len(left) * protocol.samples, name),
                )
                tokens = sum(sample.num_tokens for sample in evaluation.all_samples)
                reporter.note(f"{name}: {tokens / (time.monotonic() - began):,.0f} tokens/s")
        except KeyboardInterrupt:
            kept = f"{len(folder.records())} of {total} questions of {name} are kept in {folder.path}"
            raise Interrupted(f"stopped; {kept}: the same command goes on.") from None
        reporter.phase(f"{name}: scoring")
        return score_folder(folder, pool, plan.request.second_graders)


def rescore_stored(request: EvaluationRequest) -> EvaluationReport:
    """Grade stored samples again: those of `output` where it holds results, else those that the request would write."""
    output = request.output
    if output is not None and (output / "protocol.json").is_file():
        return rescore_folders([output], request.second_graders, output)
    plan = plan_evaluation(request)
    return rescore_folders(plan.folders.values(), request.second_graders, plan.summary_folder, names=plan.folders)


def rescore_folders(
    paths: Iterable[Path], second_graders: Sequence[str], summary_folder: Path, names: Iterable[str] = ()
) -> EvaluationReport:
    """Grade the stored samples of one model's results folders again and score them anew; needs no model. Results are
    called by the `names`, else after their benchmarks.

    Raises InputError for a folder that is no results folder or is unfinished, and for one that names a function of the
    user as its grader: no evaluation of ours writes that, and whoever sent the folder would choose what runs here.
    """
    results: dict[str, dict[str, Any]] = {}
    for path, name in zip_longest(paths, names):
        with ResultsFolder.open(path) as folder:
            grader = folder.stamp["grader"]["name"]
            if grader.startswith(PREFIX):
                danger = f"names the grader {grader!r}, which would run code"
                raise InputError(f"{path} {danger}: if you trust it, evaluate with --grader.")
            with sampling.open_pool(grader) as pool:
                rescore(folder, pool)
                results[name or folder.benchmark] = score_folder(folder, pool, second_graders)
    first = next(iter(results.values()))
    return _report(first["protocol"]["model"]["name"], results, summary_folder)


def _override(benchmark: Benchmark, values: Mapping[str, Any]) -> Benchmark:
    return replace(benchmark, protocol=replace(benchmark.protocol, **values))


def _report(model: str, results: Mapping[str, Mapping[str, Any]], folder: Path) -> EvaluationReport:
    titles = {name: title_of(result["protocol"]["benchmark"]["name"]) for name, result in results.items()}
    table = comparison.ResultTable(titles=titles, models={model: results})
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", comparison.markdown(table))
    return EvaluationReport(table=table, folder=folder)
