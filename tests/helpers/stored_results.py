"""Small results folders of evaluations that never ran: questions, samples with their verdicts, a protocol stamp."""

from pathlib import Path

from exgrpo_cli.base.types import Message, Question, StopReason, Verdict
from exgrpo_cli.evaluation import results, sampling

RIGHT, WRONG, NONE = Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER


def question(number: int, answer: str = "4") -> Question:
    prompt = (Message(role="user", content=f"Question {number}?"),)
    return Question(id=f"q{number}", prompt=prompt, answer=answer, source="made")


def record(asked: Question, *answers: tuple[str, Verdict]) -> sampling.QuestionRecord:
    samples = tuple(
        sampling.Sample(
            member=member,
            seed=member,
            text=f"So \\boxed{{{text}}}" if text else "I do not know",
            num_tokens=10,
            stop_reason=StopReason.EOS,
            logprob=-1.5,
            verdict=verdict,
        )
        for member, (text, verdict) in enumerate(answers)
    )
    return sampling.QuestionRecord(question=asked, prompt_text="Q", samples=samples)


def stamp(samples: int, **values: object) -> results.Stamp:
    made: results.Stamp = {
        "benchmark": {"name": "made", "questions": 4, "content_hash": "c0ffee"},
        "model": {"name": "a", "hash": "1"},
        "prompt": {"template": "chat", "opens_think": False, "requires_box": False, "require_eos": False},
        "sampling": {"samples": samples, "temperature": 0.6, "seed": 0},
        "grader": {"name": "math", "version": "math-verify 0.0"},
        "engine": {"name": "hf"},
        "environment": {"cores": 2},
    }
    for name, value in values.items():
        section, key = name.split("__")
        made[section][key] = value
    return made


def with_successes(path: Path, successes: list[int], **values: object) -> Path:
    """A results folder with this many successes of four at each question."""
    records = [
        record(question(n), *([("4", RIGHT)] * k + [("5", WRONG)] * (4 - k))) for n, k in enumerate(successes, start=1)
    ]
    return stored(path, records, **values)


def stored(path: Path, records: list[sampling.QuestionRecord], **values: object) -> Path:
    with results.ResultsFolder.create(path, stamp(len(records[0].samples), **values), records) as folder:
        folder.append(records)
        folder.write_results({"second_graders": {"oat": {"avg_at_k": 0.5, "low": 0.25, "high": 0.75}}})
    return path
