"""`exgrpo sample`: a few responses of a model to one question."""

from exgrpo_cli.commands.cli import Speech, print_json, talk, with_options, write_data
from exgrpo_cli.config.requests import SampleRequest


@with_options
def sample(request: SampleRequest, speech: Speech) -> None:
    """Ask a model one question, with the template of an evaluation, and print what it answers.

    \b
    Examples:
      exgrpo sample runs/exgrpo-tiny "3+4-2=?"
      exgrpo sample runs/exgrpo-tiny@best "5-1=?" --samples 4 --json
    """
    talk(f"exgrpo: asking {request.model}", quiet=speech.quiet)
    from exgrpo_cli.evaluation.local import sample as ask
    from exgrpo_cli.machine.survey import choose_threads

    sampled = ask(request, threads=choose_threads(0))
    if speech.json:
        print_json(sampled)
        return
    talk(f"--- prompt of {sampled['model']}\n{sampled['prompt']}", quiet=speech.quiet)
    for number, response in enumerate(sampled["responses"], start=1):
        size = f"{response['num_tokens']} tokens, ends by {response['stop_reason']}"
        talk(f"--- answer {number}: {size}", quiet=speech.quiet)
        write_data(response["text"])
