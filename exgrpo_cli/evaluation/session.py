"""One benchmark and one model, from the first sample to the last record, through any number of interruptions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from exgrpo_cli.base.types import Question, SamplingParams
from exgrpo_cli.evaluation.asking.askers import Asker, Prepared
from exgrpo_cli.evaluation.benchmarks.presets import Benchmark
from exgrpo_cli.evaluation.benchmarks.questions import BenchmarkQuestions
from exgrpo_cli.evaluation.results.folder import AskedQuestion, ResultsFolder
from exgrpo_cli.evaluation.results.records import QuestionRecord
from exgrpo_cli.evaluation.results.stamp import Stamp, environment, grader_version
from exgrpo_cli.evaluation.runner import evaluate_source
from exgrpo_cli.grading import GradingPool


@runtime_checkable
class QuestionProgress(Protocol):
    """Told of finished questions."""

    def found(self, records: Sequence[QuestionRecord]) -> None:
        """Those an earlier, interrupted evaluation left."""
        ...

    def asking(self) -> None:
        """The model is ready and questions go out to it; once per fixed batch."""
        ...

    def finished(self, record: QuestionRecord) -> None:
        """One more."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkSession:
    """A benchmark prepared for a model."""

    benchmark: Benchmark
    questions: BenchmarkQuestions
    prepared: Prepared
    seed: int
    batch_questions: int | None
    """Questions of one fixed batch under `--deterministic`; None keeps the engine full instead."""

    @property
    def asked(self) -> list[AskedQuestion]:
        """The questions in their order, with prompt and options as the model sees them."""
        options = self.questions.options
        return [
            AskedQuestion(question=question, prompt_text=text, options=options.get(question.id))
            for question, text in zip(self.questions.questions, self.prepared.prompt_texts, strict=True)
        ]

    def stamp(self, asker: Asker) -> Stamp:
        """Everything the score will depend on."""
        protocol, answer_format = self.benchmark.protocol, self.prepared.answer_format
        return {
            "benchmark": {
                "name": self.benchmark.name,
                "origin": self.questions.origin,
                "questions": len(self.questions.questions),
                "content_hash": self.questions.content_hash,
                "folded_rows": self.questions.num_folded,
                "shuffle_seed": protocol.shuffle_seed,
            },
            "prompt": {
                "template": self.prepared.template,
                "opens_think": answer_format.opens_think,
                "requires_box": answer_format.requires_box,
                "requires_eos": answer_format.require_eos,
            },
            "sampling": {
                "samples": protocol.samples,
                "temperature": protocol.temperature,
                "top_p": protocol.top_p,
                "max_tokens": self.prepared.max_tokens,
                "seed": self.seed,
            },
            "grader": {"name": protocol.grader, "version": grader_version(protocol.grader)},
            **asker.stamp(),
            "environment": environment(),
        }

    def run(self, folder: ResultsFolder, pool: GradingPool, progress: QuestionProgress) -> None:
        """Ask what the folder does not hold yet, and put each finished question, or fixed batch, on disk at once."""
        finished = folder.records()
        batches = self._batches()
        if self.batch_questions is not None:
            # A batch cut short by a kill is asked again as a whole, so that its rows share the batch they would have.
            whole = [q.id for batch in batches if all(q.id in finished for q in batch) for q in batch]
            if len(whole) < len(finished):
                finished = {question_id: finished[question_id] for question_id in whole}
                folder.rewrite(finished.values())
        progress.found(list(finished.values()))
        left = [[q for q in batch if q.id not in finished] for batch in batches]
        for batch in filter(None, left):
            self._ask(batch, folder, pool, progress)

    def _batches(self) -> list[Sequence[Question]]:
        questions, size = self.questions.questions, self.batch_questions or len(self.questions.questions)
        return [questions[start : start + size] for start in range(0, len(questions), size)]

    def _ask(
        self, batch: Sequence[Question], folder: ResultsFolder, pool: GradingPool, progress: QuestionProgress
    ) -> None:
        protocol = self.benchmark.protocol
        fixed = self.batch_questions is not None

        def keep(record: QuestionRecord) -> None:
            if not fixed:
                folder.append([record])
            progress.finished(record)

        source = self.prepared.source()
        progress.asking()
        evaluation = evaluate_source(
            questions=batch,
            source=source,
            pool=pool,
            answer_format=self.prepared.answer_format,
            params=SamplingParams(
                temperature=protocol.temperature, top_p=protocol.top_p, max_new_tokens=self.prepared.max_tokens
            ),
            samples=protocol.samples,
            seed=self.seed,
            options=self.questions.options,
            on_result=keep,
        )
        if fixed:
            folder.append(evaluation.records)
