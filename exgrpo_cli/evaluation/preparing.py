"""Preparing as a user asks for it: the settings, tokenizer and benchmarks that the audit of a question set needs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo_cli.base.errors import InputError, Interrupted
from exgrpo_cli.base.reporter import Reporter, make_reporter
from exgrpo_cli.base.types import Question
from exgrpo_cli.config import layers, names, requests
from exgrpo_cli.config.settings import Author
from exgrpo_cli.evaluation.benchmarks import benchmark_questions, load_benchmarks
from exgrpo_cli.models.load import load_tokenizer
from exgrpo_cli.questions import prepare as preparing
from exgrpo_cli.questions.files import stem_of, suffix_of
from exgrpo_cli.questions.prompts import PromptLimit, choose_template, encode, seen_text
from exgrpo_cli.questions.question_file import question_text
from exgrpo_cli.questions.sources import check_source


class PrepareResult(NamedTuple):
    """Reports of what was written, and the first prompts as the backbone sees them."""

    reports: Sequence[preparing.PrepareReport]
    shown: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """The report of the output, with that of the held-out questions and the prompts where there are any."""
        value = self.reports[0].to_json()
        if len(self.reports) > 1:
            value["heldout"] = self.reports[1].to_json()
        return {**value, "shown": self.shown} if self.shown else value


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparePlan:
    """A preparation with everything looked up but the questions."""

    options: preparing.PrepareOptions
    output: Path

    def to_json(self) -> dict[str, Any]:
        """The object that `--dry-run` prints."""
        options, request, data = self.options, self.options.request, self.options.settings.data
        return {
            "source": request.source,
            "output": str(self.output),
            **options.to_json(),
            "workers": options.settings.grading.workers,
            "backbone": request.backbone,
            "template": data.template if request.backbone else None,
            "max_prompt_tokens": data.max_prompt_tokens if request.backbone else None,
            "decontaminate": request.decontaminate,
            "overlap_ngram": request.ngram,
            "overlap_threshold": request.overlap,
            "split": request.split,
            "seed": preparing.seed_of(request.source, options),
        }

    def run(self, *, quiet: bool) -> PrepareResult:
        """Read, audit and write. Raises InputError and RunError as `prepare` does, Interrupted after Ctrl-C."""
        request, settings, limit = self.options.request, self.options.settings, None
        try:
            with make_reporter(quiet=quiet) as reporter:
                if request.backbone is not None:
                    data = settings.data
                    tokenizer = load_tokenizer(settings.backbone, settings.tiny, reporter.progress)
                    template = choose_template(data.template, tokenizer)
                    limit = PromptLimit(template=template, tokenizer=tokenizer, max_tokens=data.max_prompt_tokens)
                benchmarks = _benchmarks(request.decontaminate, reporter)
                options = replace(self.options, prompt_limit=limit, benchmarks=benchmarks)
                reports = preparing.prepare(request.source, self.output, options, reporter.progress)
        except KeyboardInterrupt:
            again = "run the same command again: it starts over, files fetched whole from the hub are kept"
            raise Interrupted(f"stopped, {self.output} was not written; {again}.") from None
        shown = [] if limit is None else [_seen(question, limit) for question in reports[0].questions[: request.show]]
        return PrepareResult(reports, shown)


def plan_preparation(request: requests.PrepareRequest) -> PreparePlan:
    """Everything that is known before a row is read; raises InputError for what cannot be read or written."""
    source, options = request.source, dict(request.options)
    if request.max_prompt_tokens is not None:
        options["data"] = {**options.get("data", {}), "max_prompt_tokens": request.max_prompt_tokens}
    if request.backbone is None and (request.show or request.max_prompt_tokens is not None):
        option = "--show" if request.show else "--max-prompt-tokens"
        raise InputError(f"{option} counts tokens: name the tokenizer with --backbone, for example --backbone tiny.")
    if request.seed is not None and names.is_made(source):
        options[names.section_of_made(source)] = {"seed": request.seed}
    given = {name: getattr(request, name) for name in ("backbone", "config_file", "assignments")}
    settings = layers.build_config(options=options, files=Author.of_file(request.allow_code), **given)
    names.check_functions(settings)
    # The audit has the machine to itself, unlike grading beside a training rank.
    grading = replace(settings.grading, workers=max(settings.grading.workers, os.cpu_count() or 1))
    audit = preparing.PrepareOptions(request=request, settings=replace(settings, grading=grading))
    output = request.output or preparing.default_output(source)
    check_source(source)
    preparing.outputs_of(source, output, audit)
    return PreparePlan(options=audit, output=output)


def _benchmarks(decontaminate: str | None, reporter: Reporter) -> dict[str, list[str]]:
    """Question texts of each benchmark, by name or from a file or folder of any layout."""
    texts: dict[str, list[str]] = {}
    for name in filter(None, (part.strip() for part in (decontaminate or "").split(","))):
        if Path(name).exists():
            read = preparing.read_source(name, requests.PrepareRequest(), reporter.progress)
            for reason, examples in read.marked.examples.items():
                reporter.note(f"{reason}: {examples[0]}")
            # Files of one name in different folders count as one benchmark.
            texts.setdefault(stem_of(Path(name)), []).extend(question_text(question) for question in read.questions)
            continue
        if "/" in name or suffix_of(name):
            raise InputError(f"--decontaminate {name} does not exist: name a benchmark, a question file or a folder.")
        for benchmark in load_benchmarks((name,)):
            reporter.note(f"reading benchmark {benchmark.name}")
            questions = benchmark_questions(benchmark).questions
            texts[benchmark.name] = [question_text(question) for question in questions]
    return texts


def _seen(question: Question, limit: PromptLimit) -> dict[str, Any]:
    """A prompt as the backbone sees it."""
    seen = limit.template, question, limit.tokenizer
    return {"id": question.id, "tokens": len(encode(*seen)), "text": seen_text(*seen)}
