"""Small results folders of evaluations that never ran: questions, samples with their verdicts, a protocol stamp."""

from pathlib import Path

from exgrpo_cli.base.types import Message, Question, StopReason, Verdict
from exgrpo_cli.evaluation.results.folder import AskedQuestion, ResultsFolder
from exgrpo_cli.evaluation.results.records import QuestionRecord, Sample
from exgrpo_cli.evaluation.results.stamp import Stamp

RIGHT, WRONG, NONE = Verdict.CORRECT, Verdict.WRONG, Verdict.NO_ANSWER


def question(number: int, answer: str = "4", level: str | None = None) -> Question:
    prompt = (Message(role="user", content=f"Question {number}?"),)
    return Question(id=f"q{number}", prompt=prompt, answer=answer, source="made", level=level)


def record(asked: Question, *answers: tuple[str, Verdict]) -> QuestionRecord:
    samples = tuple(
        Sample(
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
    return QuestionRecord(question=asked, samples=samples)


def stamp(samples: int, **values: object) -> Stamp:
    made: Stamp = {
        "benchmark": {"name": "made", "questions": 4, "content_hash": "c0ffee"},
        "model": {"name": "a", "hash": "1"},
        "prompt": {"template": "chat", "opens_think": False, "requires_box": False, "requires_eos": False},
        "sampling": {"samples": samples, "temperature": 0.6, "seed": 0},
        "grader": {"name": "math", "version": "math-verify 0.0"},
        "engine": {"name": "hf"},
        "environment": {"cores": 2},
    }
    for name, value in values.items():
        section, key = name.split("__")
        made[section][key] = value
    return made


def stored(path: Path, records: list[QuestionRecord], **values: object) -> Path:
    asked = [AskedQuestion(question=r.question, prompt_text="Q", options=None) for r in records]
    with ResultsFolder.create(path, stamp(len(records[0].samples), **values), asked) as folder:
        folder.append(records)
    return path
