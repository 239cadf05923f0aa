"""The toolkit from Python: what `import exgrpo_cli` offers (docs/python.md). The commands do the same in a shell.

Everything heavy is imported when it is called. Errors are those of `exgrpo_cli.base.errors`.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.base import files, reporter
from exgrpo_cli.base.errors import InputError, Interrupted

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

    from exgrpo_cli.config.settings import Config

__all__ = ["Run", "evaluate", "open_run", "prepare", "train"]

Line = Mapping[str, Any]
"""Line that a step writes into `metrics.jsonl`: flat keys, "step" first."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, finished or still growing; each call reads what is there now."""

    folder: Path

    @property
    def config(self) -> "Config":
        """Its settings. Raises InputError where the file is broken."""
        from exgrpo_cli.show.record import read_config

        return read_config(self.folder)

    @property
    def finished(self) -> bool:
        """Whether it has trained to its end."""
        return self.summary is not None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The final figures (`summary.json`); None for a run that has not finished."""
        path = self.folder / "summary.json"
        return files.read_json(path) if path.is_file() else None

    def metrics(self) -> "pa.Table":
        """One row per step, a column for every key that any step has; null where a step lacks it."""
        import pyarrow as pa

        from exgrpo_cli.runs.folder import RunFolder

        lines = list(RunFolder(self.folder).metrics_lines())
        names = dict.fromkeys(name for line in lines for name in line)
        return pa.table({name: [line.get(name) for line in lines] for name in names})

    def ledger(self, table: str = "trajectories") -> "pa.Table":
        """A table of its experience: trajectories, scores, draws, visits, replays or events (docs/ledger.md).

        Raises InputError for a run without a ledger and for another name.
        """
        from exgrpo_cli.config.sections import require_known
        from exgrpo_cli.ledger.reader import LedgerReader
        from exgrpo_cli.ledger.schemas import BODIES, TABLES

        require_known("the ledger's table", table, tuple(name for name in TABLES if name != BODIES))
        return LedgerReader(self.folder / "replay").table(table)

    def bodies(self, trajectory_ids: Sequence[int]) -> "pa.Table":
        """`token_ids` and `behaviour_logprobs` of some trajectories, in the order of the ids, bit for bit.

        Raises InputError for an unknown id.
        """
        import pyarrow as pa

        from exgrpo_cli.ledger.reader import LedgerReader
        from exgrpo_cli.ledger.writer import bodies_batch

        batch = bodies_batch(0, LedgerReader(self.folder / "replay").bodies(trajectory_ids))
        return pa.Table.from_batches([batch]).set_column(0, "trajectory_id", pa.array(trajectory_ids))

    def texts(self, trajectory_ids: Sequence[int]) -> dict[int, str]:
        """Decoded responses by trajectory id; empty while the run has no tokenizer."""
        from exgrpo_cli.show.record import response_texts

        return response_texts(self.folder, self.config.backbone.source, trajectory_ids)

    def replay_stats(self) -> dict[str, Any]:
        """Object that `exgrpo replay-stats --json` prints. Raises InputError for a run that keeps no ledger."""
        from exgrpo_cli.show.record import read_run
        from exgrpo_cli.show.statistics import plain, summarise

        return plain(summarise(read_run(self.folder)))

    def figures(self) -> "Iterator[tuple[str, Figure]]":
        """Name and matplotlib figure of everything that the run has data for."""
        from exgrpo_cli.show.statistics import run_figures

        return run_figures(self.folder)

    def report(self) -> Path:
        """Write `report.html` into the folder; returns its path."""
        from exgrpo_cli.show.report import write_report

        return write_report(self.folder)


def open_run(name: str | Path) -> Run:
    """A run by its folder, or a published one by `hf://OWNER/NAME`. Raises InputError for what is no run."""
    from exgrpo_cli.publishing.hub import local_run
    from exgrpo_cli.runs.folder import RunFolder

    return Run(RunFolder.existing(local_run(str(name))).path.absolute())


def prepare(
    source: str = "arithmetic", output: str | Path | None = None, *, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Turn a question set into one audited question file (`exgrpo prepare`); returns its report as `--json` has it.

    `settings` are by "section.key". Raises InputError for a source that cannot be read.
    """
    from exgrpo_cli.config.requests import PrepareRequest
    from exgrpo_cli.evaluation.preparing import plan_preparation

    path = None if output is None else Path(output)
    request = PrepareRequest(source=source, output=path, options=_layer(settings))
    return plan_preparation(request).run(quiet=True).to_json()


def train(
    output: str | Path,
    *,
    backbone: str | None = None,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
    resume: bool = False,
    allow_code: bool = False,
    on_step: Callable[[Line], object] | None = None,
    on_note: Callable[[str], object] | None = None,
) -> Run:
    """Train in this process and return the run, finished or stopped with its state saved.

    `settings` are by "section.key", as for `--set`; what is not named is as `exgrpo train` has it, one rank alone.
    `allow_code` lets a method's file and a resumed run of somebody else name functions to run.
    `on_step` is told every step's line, and stops the run after this step by returning True (in the main thread);
    `on_note` is told what the command would say. Raises InputError before work starts, RunError where it stops under
    way; what a callback raises ends the run, which `resume` goes on with from its newest checkpoint.
    """
    from exgrpo_cli.config.requests import RunRequest
    from exgrpo_cli.training.run import train as train_run
    from exgrpo_cli.training.start import plan_start

    layer = _layer({"run.nproc": 1, **(settings or {})})
    request = RunRequest(
        backbone=backbone, method=method, options=layer, output=Path(output), resume=resume, allow_code=allow_code
    )
    start = plan_start(request)
    try:
        train_run(start.config, start.folder, resume=resume, reporter=_Callbacks(on_step, on_note))
    except Interrupted as stopped:
        if on_note is not None:
            on_note(str(stopped))
    return Run(start.folder.absolute())


def evaluate(
    benchmarks: str | Sequence[str],
    model: str | Path | Run,
    *,
    output: str | Path | None = None,
    data: str | Path | None = None,
    protocol: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Score a model on benchmarks (`exgrpo evaluate --json`): a run, `RUN@best`, a folder or a hub id.

    `protocol` replaces values of the presets': samples, temperature, top_p, max_tokens, template. Raises InputError
    for what is unknown or cannot be had, RunError where it stops under way.
    """
    from exgrpo_cli.config.requests import EvaluationRequest
    from exgrpo_cli.evaluation.service import evaluate as ask
    from exgrpo_cli.evaluation.service import plan_evaluation

    request = EvaluationRequest(
        benchmarks=(benchmarks,) if isinstance(benchmarks, str) else tuple(benchmarks),
        model=str(model.folder if isinstance(model, Run) else model),
        output=None if output is None else Path(output),
        data=None if data is None else Path(data),
        protocol=protocol or {},
        seed=seed,
    )
    return ask(plan_evaluation(request), lambda text: None, quiet=True).to_json()


class _Callbacks(reporter.Reporter):
    """A reporter that tells functions."""

    def __init__(self, on_step: Callable[[Line], object] | None, on_note: Callable[[str], object] | None) -> None:
        self._on_step = on_step
        self._on_note = on_note

    def note(self, text: str) -> None:
        """Pass a line on."""
        if self._on_note is not None:
            self._on_note(text)

    def step(self, line: Line, total: int) -> None:
        """Pass a step's line on, and ask the run to stop where the answer is True."""
        if self._on_step is not None and self._on_step(line) is True:
            if threading.current_thread() is not threading.main_thread():
                raise InputError("on_step can stop a run in the main thread only: raise an error of your own instead.")
            # The run takes it as a stop signal from outside: this step is saved, then it ends.
            signal.raise_signal(signal.SIGTERM)


def _layer(settings: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    layer: dict[str, dict[str, Any]] = {}
    for name, value in (settings or {}).items():
        section, dot, key = name.partition(".")
        if not dot:
            raise InputError(f"settings: {name!r} is not of the form section.key, such as run.steps.")
        layer.setdefault(section, {})[key] = value
    return layer
