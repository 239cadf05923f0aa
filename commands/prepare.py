"""`exgrpo prepare`: any question set in, one audited question file out."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exgrpo_cli.commands.options import (
    ConfigOption,
    DebugOption,
    DryRunOption,
    JsonOption,
    OutputOption,
    QuietOption,
    SeedOption,
    SetOption,
    option_layer,
    print_json,
)

if TYPE_CHECKING:
    from exgrpo_cli.config.settings import Config
    from exgrpo_cli.console.reporter import Reporter
    from exgrpo_cli.data.audit.report import PrepareReport
    from exgrpo_cli.data.prepare import PrepareOptions, PromptLimit
    from exgrpo_cli.types import Question


def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="arithmetic, word-problems, a file, a folder, or a Hugging Face id (owner/name@revision:split)."
        ),
    ] = "arithmetic",
    output: OutputOption = None,
    layout: Annotated[Literal["canonical", "verl"], typer.Option(help="Layout of the output.")] = "canonical",
    question_field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the question; dots lead into structs.")
    ] = None,
    answer_field: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the gold answer.")] = None,
    answer_pattern: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Its last match in the answer field is the gold (group 1).")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(metavar="NAME", help="Check prompt lengths with this backbone's tokenizer.")
    ] = None,
    show: Annotated[
        int, typer.Option(metavar="N", min=0, help="Print the first N prompts as the backbone sees them.")
    ] = 0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longer prompts are left out.", show_default="the backbone's")
    ] = None,
    decontaminate: Annotated[
        str | None, typer.Option(metavar="LIST", help="Benchmarks or files of questions to leave out, comma list.")
    ] = None,
    overlap: Annotated[
        float, typer.Option(help="Share of a benchmark question's n-grams from which a question is left out.")
    ] = 0.5,
    ngram: Annotated[int, typer.Option(help="Words of those n-grams.")] = 8,
    grader: Annotated[
        str | None, typer.Option(help="Verifier of the gold answers.", show_default="math, choice for options")
    ] = None,
    seed: SeedOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    dry_run: DryRunOption = False,
    quiet: QuietOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Turn any question set into one audited question file, by default data/<source>.parquet.

    Exact duplicates are folded; gold answers that do not verify against themselves, prompts over the token limit and
    questions of evaluation benchmarks are left out and counted. `arithmetic` and `word-problems`, which are built in,
    write their held-out questions beside it.

    \b
    Examples:
      exgrpo prepare
      exgrpo prepare word-problems
      exgrpo prepare openai/gsm8k:main --backbone qwen-math-1.5b --show 3
      exgrpo prepare questions.jsonl --question-field text --answer-field gold --output data/mine.parquet
      exgrpo prepare Elliott/Openr1-Math-46k-8192 --decontaminate aime24,math500
    """
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.console.reporter import make_reporter
    from exgrpo_cli.data.layouts.recognise import NamedFields
    from exgrpo_cli.data.prepare import PrepareOptions, check_output, check_source, default_output
    from exgrpo_cli.data.prepare import prepare as prepare_source
    from exgrpo_cli.errors import InputError, Interrupted

    if backbone is None and (show or max_prompt_tokens is not None):
        option = "--show" if show else "--max-prompt-tokens"
        raise InputError(f"{option} counts tokens: name the tokenizer with --backbone, for example --backbone tiny.")
    layer = option_layer(
        {
            "arithmetic.seed": seed,
            "word_problems.seed": seed,
            "grading.grader": grader,
            "data.max_prompt_tokens": max_prompt_tokens,
        }
    )
    settings = build_config(backbone=backbone, config_file=config, options=layer, assignments=assignments or [])
    options = PrepareOptions(
        layout=layout,
        fields=NamedFields(question=question_field, answer=answer_field, answer_pattern=answer_pattern),
        # The audit has the machine to itself, unlike grading beside a training rank.
        grading=replace(settings.grading, workers=max(settings.grading.workers, os.cpu_count() or 1)),
        overlap_ngram=ngram,
        overlap_threshold=overlap,
        arithmetic=settings.arithmetic,
        word_problems=settings.word_problems,
    )
    output = output or default_output(source)
    outputs = [output, *_heldout_beside(source, output)]
    check_source(source)
    for path in outputs:
        check_output(source, path)
    if dry_run:
        _print_plan(source, output, options, backbone, settings, decontaminate, json)
        return
    reporter = make_reporter(quiet=quiet)
    try:
        limit = None if backbone is None else _prompt_limit(settings, reporter)
        options = replace(options, prompt_limit=limit, benchmarks=_benchmarks(decontaminate, reporter))
        reports = [
            prepare_source(source, path, replace(options, heldout=path is not output), reporter.progress)
            for path in outputs
        ]
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped, {outputs[-1]} was not written; run the same command again: it starts over, "
            f"files fetched whole from the hub are kept."
        ) from None
    finally:
        reporter.close()
    shown = _rendered(reports[0].questions[:show], limit)
    if json:
        print_json(_as_json(reports, shown))
        return
    for prompt in shown:
        typer.echo(f"--- question {prompt['id']}, {prompt['tokens']} tokens\n{prompt['text']}\n---")
    if not quiet:
        typer.echo("\n".join(line for report in reports for line in report.lines()))


def _heldout_beside(source: str, output: Path) -> list[Path]:
    """Where the held-out questions go: built-in sources alone have some."""
    from exgrpo_cli.data.reading import BUILT_IN

    return [output.with_stem(f"{output.stem}-heldout")] if source in BUILT_IN else []


def _prompt_limit(settings: "Config", reporter: "Reporter") -> "PromptLimit":
    from exgrpo_cli.backbones.load import load_tokenizer
    from exgrpo_cli.data.prepare import PromptLimit
    from exgrpo_cli.data.prompts import choose_template

    tokenizer = load_tokenizer(settings.backbone, settings.tiny, reporter.progress)
    template = choose_template(settings.data.template, tokenizer)
    return PromptLimit(template=template, tokenizer=tokenizer, max_tokens=settings.data.max_prompt_tokens)


def _benchmarks(decontaminate: str | None, reporter: "Reporter") -> dict[str, list[str]]:
    """Question texts of each benchmark, by name or from a file or folder of any layout."""
    from exgrpo_cli.data.audit.checks import Tally, question_text
    from exgrpo_cli.data.layouts.recognise import NamedFields
    from exgrpo_cli.data.reading import read_source
    from exgrpo_cli.data.sources.formats import stem_of, suffix_of
    from exgrpo_cli.errors import InputError
    from exgrpo_cli.evaluation.benchmarks.presets import load_suite
    from exgrpo_cli.evaluation.benchmarks.questions import benchmark_questions

    texts: dict[str, list[str]] = {}
    for name in filter(None, (part.strip() for part in (decontaminate or "").split(","))):
        if Path(name).exists():
            read = read_source(name, NamedFields(), Tally(), reporter.progress)
            # Files of one name in different folders count as one benchmark.
            texts.setdefault(stem_of(Path(name)), []).extend(question_text(question) for question in read.questions)
            continue
        if "/" in name or suffix_of(name):
            raise InputError(f"--decontaminate {name} does not exist: name a benchmark, a question file or a folder.")
        for benchmark in load_suite((name,)).benchmarks:
            reporter.note(f"reading benchmark {benchmark.name}")
            asked = benchmark_questions(benchmark).questions
            texts[benchmark.name] = [question_text(question) for question in asked]
    return texts


def _print_plan(
    source: str,
    output: Path,
    options: "PrepareOptions",
    backbone: str | None,
    settings: "Config",
    decontaminate: str | None,
    json: bool,
) -> None:
    plan: dict[str, Any] = {
        "source": source,
        "output": str(output),
        "layout": options.layout,
        "question_field": options.fields.question,
        "answer_field": options.fields.answer,
        "answer_pattern": options.fields.answer_pattern,
        "grader": options.grading.grader,
        "workers": options.grading.workers,
        "backbone": backbone,
        "template": settings.data.template if backbone else None,
        "max_prompt_tokens": settings.data.max_prompt_tokens if backbone else None,
        "decontaminate": decontaminate,
        "overlap_ngram": options.overlap_ngram,
        "overlap_threshold": options.overlap_threshold,
        "seed": options.arithmetic.seed,
    }
    if json:
        print_json(plan)
    else:
        typer.echo("\n".join(f"{name} = {value}" for name, value in plan.items() if value is not None))


def _rendered(questions: "Sequence[Question]", limit: "PromptLimit | None") -> list[dict[str, Any]]:
    """The first prompts as the backbone sees them."""
    from exgrpo_cli.data.prompts import encode, seen_text

    if limit is None:
        return []
    return [
        {
            "id": question.id,
            "tokens": len(encode(limit.template, question, limit.tokenizer)),
            "text": seen_text(limit.template, question, limit.tokenizer),
        }
        for question in questions
    ]


def _as_json(reports: "Sequence[PrepareReport]", shown: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of the output, with that of the held-out questions and the prompts asked for where there are any."""
    value = reports[0].to_json()
    if len(reports) > 1:
        value["heldout"] = reports[1].to_json()
    return {**value, "shown": shown} if shown else value
