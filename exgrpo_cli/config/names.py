"""Names of the built-in replay rules: settings, plug-ins, command line and the arms of a study read them here."""

METRICS = ("ent", "ent-sum", "ppl", "length", "random")
"""What orders the stored trajectories of a question."""
UNSCORED_METRICS = ("length", "random")
"""Those that look at no measurement, so that no forward pass is needed for them."""
DIRECTIONS = ("min", "max")
"""Whether the lowest or the highest of a metric is replayed."""
SAMPLERS = ("normal", "linear", "linear-clip", "sqrt", "uniform")
"""How the weight of a question depends on its pass rate."""
EVICTIONS = ("oldest", "highest-entropy", "longest", "random")
"""Which trajectory leaves a question that holds as many as it may."""
PREFIX = "python:"
"""What a function of the user starts with: `python:module:function`."""
