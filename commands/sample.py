"""`exgrpo sample`: a few responses of a model to one question."""

from dataclasses import asdict, dataclass
from typing import Literal

from exgrpo_cli.commands.cli import Speech, print_json, talk, with_options, write_data
from exgrpo_cli.config.names import Device


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Prompts and parameters of what is sampled, and where."""

    samples: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    seed: int = 0
    engine: Literal["hf", "vllm"] = "hf"
    device: Device = "auto"


@with_options
def sample(
    model: str,
    question: str,
    *,
    speech: Speech,
    options: SampleOptions,
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

    sampled = ask(model, question, threads=choose_threads(0), **asdict(options))
    if speech.json:
        print_json(sampled)
        return
    talk(f"--- prompt of {sampled['model']}\n{sampled['prompt']}", quiet=speech.quiet)
    for number, response in enumerate(sampled["responses"], start=1):
        size = f"{response['num_tokens']} tokens, ends by {response['stop_reason']}"
        talk(f"--- answer {number}: {size}", quiet=speech.quiet)
        write_data(response["text"])
