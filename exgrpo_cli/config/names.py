"""Names of the built-in replay rules: settings, plug-ins, command line and the arms of a study read them here."""

METRICS = ("ent", "ent-sum", "ppl", "length", "random", "reward", "age")
"""What orders the stored trajectories of a question."""
UNSCORED_METRICS = ("length", "random", "reward", "age")
"""Those that look at no measurement, so that no forward pass is needed for them."""
DIRECTIONS = ("min", "max")
"""Whether the lowest or the highest of a metric is replayed."""
SAMPLERS = ("normal", "linear", "linear-clip", "sqrt", "uniform")
"""How the weight of a question depends on its pass rate."""
EVICTIONS = ("oldest", "highest-entropy", "longest", "random", "lowest-priority")
"""What leaves a question or a store that holds as much as it may."""
PRIORITIES = ("uniform", "latest", "advantage", "reward", "headroom", "signal")
"""What a unit weighs where units are drawn by priority."""
DRAWS = ("proportional", "top")
"""Whether units are drawn in proportion to their priority, or the highest taken."""
GRADERS = ("math", "choice", "exact", "oat")
"""How an answer is verified."""
BUILT_IN = ("arithmetic", "word-problems", "countdown", "modular")
"""Question sources that the program makes itself, each with held-out questions."""
GYM = "gym:"
"""What a task of reasoning-gym starts with as a source: `gym:spell_backward`."""
TINY_TASKS = ("arithmetic", "countdown", "modular")
"""Those whose traces the tiny backbone can learn from the start."""
PREFIX = "python:"
"""What a function of the user starts with: `python:module:function`."""


def is_made(source: str) -> bool:
    """Whether the program makes the questions of a source itself."""
    return source in BUILT_IN or source.startswith(GYM)


def section_of_made(source: str) -> str:
    """Section of the settings of a made source."""
    return source.partition(":")[0].replace("-", "_")


def is_gguf(source: str) -> bool:
    """Whether `source` means a GGUF file of this machine, there or not."""
    return source.lower().endswith(".gguf")
