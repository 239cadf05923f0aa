"""`exgrpo prepare`: any question set in, one audited question file out."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from exgrpo_cli.commands import cli
from exgrpo_cli.config.requests import PrepareRequest


@cli.with_options
def prepare(request: PrepareRequest, speech: cli.Speech, experience: Path | None = None, dry_run: bool = False) -> None:
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
    from exgrpo_cli.evaluation.preparing import plan_preparation

    if experience is not None:
        _prepare_pool(experience, request, speech, dry_run=dry_run)
        return
    plan = plan_preparation(request)
    if dry_run:
        _print_plan(plan.to_json(), speech.json)
        return
    cli.talk(f"exgrpo: reading {request.source}", quiet=speech.quiet)
    prepared = plan.run(quiet=speech.quiet)
    if speech.json:
        cli.print_json(prepared.to_json())
        return
    for prompt in prepared.shown:
        cli.write_data(f"--- question {prompt['id']}, {prompt['tokens']} tokens\n{prompt['text']}\n---")
    if not speech.quiet:
        cli.write_data("\n".join(line for report in prepared.reports for line in report.lines()))


def _prepare_pool(experience: Path, request: PrepareRequest, speech: cli.Speech, *, dry_run: bool) -> None:
    """Rollouts logged elsewhere as a folder for `train --replay-from`."""
    from exgrpo_cli.base.reporter import make_reporter
    from exgrpo_cli.config.layers import build_config
    from exgrpo_cli.config.settings import Author, to_toml
    from exgrpo_cli.questions.files import stem_of
    from exgrpo_cli.questions.prepare import DATA_FOLDER
    from exgrpo_cli.runs.folder import RunFolder
    from exgrpo_cli.training.importing import prepare_pool

    # Without a source the questions are those that a run would take.
    data = {} if request.source == "arithmetic" else {"train": cli.lasting(request.source)}
    config = build_config(
        backbone=request.backbone,
        config_file=request.config_file,
        options={"data": data, "run": {} if request.seed is None else {"seed": request.seed}},
        assignments=request.assignments,
        files=Author.of_file(request.allow_code),
    )
    output = request.output or DATA_FOLDER / f"{stem_of(experience)}-pool"
    if dry_run:
        RunFolder.check_new(output)
        planned = f"# output {output}\n\n{to_toml(config)}"
        cli.print_json({"output": str(output)}) if speech.json else cli.write_data(planned)
        return
    with make_reporter(quiet=speech.quiet) as reporter:
        report = prepare_pool(experience, output, config, reporter)
    if speech.json or not speech.quiet:
        _print_plan(asdict(report), speech.json)


def _print_plan(plan: dict[str, Any], json: bool) -> None:
    lines = "\n".join(f"{name} = {value}" for name, value in plan.items() if value is not None)
    cli.print_json(plan) if json else cli.write_data(lines)
