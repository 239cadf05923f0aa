"""`exgrpo sample`: a few responses of a model to one question."""

from typing import Annotated, Literal

import typer

from exgrpo_cli.commands.cli import Speech, option, print_json, talk, with_groups, write_data
from exgrpo_cli.config.names import Device


@with_groups
def sample(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Run (RUN@best, RUN@step-000050), model folder, GGUF file, preset or hub id."
        ),
    ],
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask, in quotes.")],
    *,
    speech: Speech,
    samples: Annotated[int, option("Responses.", min=1, metavar="K")] = 1,
    temperature: Annotated[float, option("T; training samples at 1, most evaluations at 0.6.", min=0.01)] = 1.0,
    max_tokens: Annotated[int | None, option("New tokens at most.", min=1, default="the run's own limit, else 512")] = (
        None
    ),
    seed: Annotated[int, option("Seed of the responses.", min=0)] = 0,
    engine: Annotated[Literal["hf", "vllm"], option("Engine.")] = "hf",
    device: Annotated[Device, option("Where the model is loaded.")] = "auto",
) -> None:
    """Ask a model one question, with the template of an evaluation, and print what it answers.

    \b
    Examples:
      exgrpo sample runs/exgrpo-tiny "3+4-2=?"
      exgrpo sample runs/exgrpo-tiny@best "5-1=?" --samples 4 --json
    """
    talk(f"exgrpo: asking {model}", quiet=speech.quiet)
    from exgrpo_cli.evaluation.local import sample as ask
    from exgrpo_cli.machine.survey import choose_threads

    sampled = ask(
        model,
        question,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        engine=engine,
        device=device,
        threads=choose_threads(0),
    )
    if speech.json:
        print_json(sampled)
        return
    talk(f"--- prompt of {sampled['model']}\n{sampled['prompt']}", quiet=speech.quiet)
    for number, response in enumerate(sampled["responses"], start=1):
        size = f"{response['num_tokens']} tokens, ends by {response['stop_reason']}"
        talk(f"--- answer {number}: {size}", quiet=speech.quiet)
        write_data(response["text"])
