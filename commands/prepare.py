"""`exgrpo prepare`: any question set in, one audited question file out."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from exgrpo_cli.commands import cli

if TYPE_CHECKING:
    from exgrpo_cli.evaluation.preparing import PrepareRequest


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Options of reading and auditing a source, and where it goes."""

    output: Path | None = None
    layout: Literal["canonical", "verl"] = "canonical"
    question_field: str | None = None
    answer_field: str | None = None
    answer_pattern: str | None = None
    backbone: str | None = None
    show: int = 0
    max_prompt_tokens: int | None = None
    decontaminate: str | None = None
    overlap: float = 0.5
    ngram: int = 8
    split: float | None = None
    experience: Path | None = None
    grader: str | None = None
    seed: int | None = None
    config: Path | None = None
    assignments: list[str] | None = None
    allow_code: bool = False

    def request(self, source: str) -> "PrepareRequest":
        """The options as the core takes them."""
        from exgrpo_cli.config.names import is_made, section_of_made
        from exgrpo_cli.evaluation.preparing import PrepareRequest
        from exgrpo_cli.questions.layouts import NamedFields

        settings: dict[str, Any] = {"grading.grader": self.grader}
        if is_made(source):
            settings[f"{section_of_made(source)}.seed"] = self.seed
        named = NamedFields(question=self.question_field, answer=self.answer_field, answer_pattern=self.answer_pattern)
        audited = {"fields": named, "overlap_threshold": self.overlap, "overlap_ngram": self.ngram}
        return cli.request_of(PrepareRequest, self, settings, source=source, **audited)


@cli.with_options
def prepare(
    source: str = "arithmetic",
    *,
    options: PrepareSettings,
    speech: cli.Speech,
    dry_run: bool = False,
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
    cli.talk(f"exgrpo: reading {source}", quiet=speech.quiet)
    prepared = plan.run(quiet=speech.quiet)
    if speech.json:
        cli.print_json(prepared.to_json())
        return
    for prompt in prepared.shown:
        cli.write_data(f"--- question {prompt['id']}, {prompt['tokens']} tokens\n{prompt['text']}\n---")
    if not speech.quiet:
        cli.write_data("\n".join(line for report in prepared.reports for line in report.lines()))


def _prepare_pool(source: str, options: PrepareSettings, speech: cli.Speech, *, dry_run: bool) -> None:
    """Rollouts logged elsewhere as a folder for `train --replay-from`."""
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.config.settings import Author, to_toml
    from exgrpo_cli.questions.files import stem_of
    from exgrpo_cli.questions.prepare import DATA_FOLDER
    from exgrpo_cli.runs.folder import RunFolder
    from exgrpo_cli.training.importing import prepare_pool

    assert options.experience is not None
    with_pool = ("experience", "output", "backbone", "seed", "config", "assignments", "allow_code")
    cli.refuse_others(options, with_pool, "is about a question file, --experience makes a pool")
    config = build_config(
        backbone=options.backbone,
        config_file=options.config,
        # Without a source the questions are those that a run would take.
        options=cli.option_layer({"run.seed": options.seed, "data.train": None if source == "arithmetic" else source}),
        assignments=options.assignments or [],
        files=Author.of_file(options.allow_code),
    )
    output = options.output or DATA_FOLDER / f"{stem_of(options.experience)}-pool"
    if dry_run:
        RunFolder.check_new(output)
        cli.print_json({"output": str(output)}) if speech.json else cli.write_data(
            f"# output {output}\n\n{to_toml(config)}"
        )
        return
    reporter = make_reporter(quiet=speech.quiet)
    try:
        report = prepare_pool(options.experience, output, config, reporter)
    finally:
        reporter.close()
    if speech.json or not speech.quiet:
        _print_plan(asdict(report), speech.json)


def _print_plan(plan: dict[str, Any], json: bool) -> None:
    if json:
        cli.print_json(plan)
    else:
        cli.write_data("\n".join(f"{name} = {value}" for name, value in plan.items() if value is not None))
