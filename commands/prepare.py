"""`exgrpo prepare`: any question set in, one audited question file out."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from exgrpo_cli.commands.options import (
    AllowCodeOption,
    ConfigOption,
    DryRunOption,
    OutputOption,
    SeedOption,
    SetOption,
    Speech,
    option_layer,
    presets_of,
    print_json,
    shared_options,
    talk,
    whole_path,
    with_groups,
    write_data,
)

if TYPE_CHECKING:
    from exgrpo_cli.evaluation.preparing import PrepareRequest


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Options of reading and auditing a source, and where it goes."""

    output: OutputOption = None
    layout: Annotated[Literal["canonical", "verl"], typer.Option(help="Layout of the output.")] = "canonical"
    question_field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the question; dots lead into structs.")
    ] = None
    answer_field: Annotated[str | None, typer.Option(metavar="NAME", help="Column of the gold answer.")] = None
    answer_pattern: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Its last match in the answer field is the gold (group 1).")
    ] = None
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Check prompt lengths with this backbone's tokenizer.",
            autocompletion=presets_of("backbones"),
        ),
    ] = None
    show: Annotated[
        int, typer.Option(metavar="N", min=0, help="Print the first N prompts as the backbone sees them.")
    ] = 0
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longer prompts are left out.", show_default="the backbone's")
    ] = None
    decontaminate: Annotated[
        str | None, typer.Option(metavar="LIST", help="Benchmarks or files of questions to leave out, comma list.")
    ] = None
    overlap: Annotated[
        float, typer.Option(help="Share of a benchmark question's n-grams from which a question is left out.")
    ] = 0.5
    ngram: Annotated[int, typer.Option(help="Words of those n-grams.")] = 8
    split: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="Share of the questions to hold out, in a second file beside the first."),
    ] = None
    experience: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rollouts of these questions that were logged elsewhere (.jsonl, .parquet): made a pool for "
            "train --replay-from instead.",
        ),
    ] = None
    grader: Annotated[
        str | None, typer.Option(help="Verifier of the gold answers.", show_default="math, choice for options")
    ] = None
    seed: SeedOption = None
    config: ConfigOption = None
    assignments: SetOption = None
    allow_code: AllowCodeOption = False

    def request(self, source: str) -> "PrepareRequest":
        """The options as the core takes them."""
        from exgrpo_cli.config.names import is_made, section_of_made
        from exgrpo_cli.evaluation.preparing import PrepareRequest
        from exgrpo_cli.questions.layouts import NamedFields

        layer: dict[str, Any] = {"grading.grader": self.grader}
        if is_made(source):
            layer[f"{section_of_made(source)}.seed"] = self.seed
        named = NamedFields(question=self.question_field, answer=self.answer_field, answer_pattern=self.answer_pattern)
        own = {"source": source, "fields": named, "config_file": self.config, "options": option_layer(layer)}
        return PrepareRequest(**shared_options(self, PrepareRequest) | own)


@with_groups
def prepare(
    source: Annotated[
        str,
        typer.Argument(
            help="A task made here, such as countdown or gym:TASK, a file, a folder, or a hub id "
            "(owner/name@revision:split)."
        ),
    ] = "arithmetic",
    *,
    options: PrepareSettings,
    speech: Speech,
    dry_run: DryRunOption = False,
) -> None:
    """Turn any question set into one audited question file, by default data/<source>.parquet.

    Exact duplicates are folded; gold answers that do not verify against themselves, prompts over the token limit and
    questions of evaluation benchmarks are left out and counted. `arithmetic`, `word-problems`, `countdown`,
    `modular` and `gym:TASK`, which are made here, write their held-out questions beside it.

    \b
    Examples:
      exgrpo prepare
      exgrpo prepare word-problems
      exgrpo prepare openai/gsm8k:main --backbone qwen-math-1.5b --show 3
      exgrpo prepare questions.jsonl --question-field text --answer-field gold --output data/mine.parquet
      exgrpo prepare questions.jsonl --split 0.1
      exgrpo prepare Elliott/Openr1-Math-46k-8192 --decontaminate aime24,math500
      exgrpo prepare data/mine.parquet --experience rollouts.jsonl --backbone qwen-math-1.5b
    """
    if options.experience is not None:
        _prepare_pool(source, options, speech, dry_run=dry_run)
        return
    plan = options.request(source).plan()
    if dry_run:
        _print_plan(plan.to_json(), speech.json)
        return
    talk(f"exgrpo: reading {source}", quiet=speech.quiet)
    prepared = plan.run(quiet=speech.quiet)
    if speech.json:
        print_json(prepared.to_json())
        return
    for prompt in prepared.shown:
        write_data(f"--- question {prompt['id']}, {prompt['tokens']} tokens\n{prompt['text']}\n---")
    if not speech.quiet:
        write_data("\n".join(line for report in prepared.reports for line in report.lines()))


def _prepare_pool(source: str, options: PrepareSettings, speech: Speech, *, dry_run: bool) -> None:
    """Rollouts logged elsewhere as a folder for `train --replay-from`."""
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.config.settings import to_toml
    from exgrpo_cli.training.importing import check_pool, pool_folder, prepare_pool

    assert options.experience is not None
    with_pool = ("experience", "output", "backbone", "seed", "config", "assignments", "allow_code")
    for field in fields(options):
        if field.name not in with_pool and getattr(options, field.name) != field.default:
            option = field.name.replace("_", "-")
            raise typer.BadParameter(f"--{option} is about a question file, --experience makes a pool: leave it out.")
    # Without a source the questions are those that a run would take.
    data = None if source == "arithmetic" else whole_path(source)
    config = build_config(
        backbone=options.backbone,
        config_file=options.config,
        options=option_layer({"run.seed": options.seed, "data.train": data}),
        assignments=options.assignments or [],
        allow_code=options.allow_code,
    )
    output = options.output or pool_folder(options.experience)
    if dry_run:
        check_pool(options.experience, output)
        print_json({"output": str(output)}) if speech.json else write_data(f"# output {output}\n\n{to_toml(config)}")
        return
    reporter = make_reporter(quiet=speech.quiet)
    try:
        report = prepare_pool(options.experience, output, config, reporter)
    finally:
        reporter.close()
    if speech.json:
        print_json(report.to_json())
    elif not speech.quiet:
        write_data("\n".join(report.lines(config.rollout.group_size)))


def _print_plan(plan: dict[str, Any], json: bool) -> None:
    if json:
        print_json(plan)
    else:
        write_data("\n".join(f"{name} = {value}" for name, value in plan.items() if value is not None))
