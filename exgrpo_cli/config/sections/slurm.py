"""What a job asks Slurm for: the `[slurm]` table of a configuration file, which no run's own settings hold."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from exgrpo_cli.base.errors import InputError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings:
    """What a job asks for; what is empty or 0 is left to the cluster's defaults."""

    partition: str = ""
    """Where the jobs go."""
    account: str = ""
    """Who pays."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features of the nodes."""
    hours: float = 24.0
    """Most that a task may run; a run that needs more is requeued and resumes."""
    nodes: int = 1
    """Hosts of one run (`exgrpo train`); what follows is for each of them."""
    gpus: int = 0
    """Per task, all of them used by its one run."""
    cpus: int = 0
    """Per task."""
    memory_gb: float = 0.0
    """Per task, in GB."""
    parallel: int = 0
    """Tasks of the array that may run at once; 0 is all."""
    save_minutes: float = 5.0
    """Before the end of its time, when a task is told to save."""
    setup: tuple[str, ...] = ()
    """Lines of the script before the run: modules, environments."""
    shared: bool = False
    """Every node sees the study's folder, although its file system looks like one of this host alone."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise InputError(f"slurm.{field.name} = {value!r} must not be negative.")
        if not self.nodes:
            raise InputError("slurm.nodes = 0 must be at least 1.")
        if 60 * self.hours <= self.save_minutes:
            raise InputError(f"slurm.hours = {self.hours} must be more than slurm.save_minutes = {self.save_minutes}.")

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "SlurmSettings":
        """The settings of a `[slurm]` table. Raises InputError for an unknown key or a value of a wrong type."""
        known = [field.name for field in fields(cls)]
        for name in table:
            if name not in known:
                raise InputError(f"slurm.{name} is no setting.{nearest(name, known)}")
        kinds = {**get_type_hints(cls), "setup": list}
        for name, value in table.items():
            expected = (int, float) if kinds[name] is float else kinds[name]
            wrong = not isinstance(value, expected) or (isinstance(value, bool) and kinds[name] is not bool)
            if wrong or (name == "setup" and not all(isinstance(line, str) for line in value)):
                kind = "a list of lines, such as ['module load cuda']" if name == "setup" else kinds[name].__name__
                raise InputError(f"slurm.{name} = {value!r} must be {kind}.")
        return cls(**{**table, "setup": tuple(table.get("setup", ()))})
