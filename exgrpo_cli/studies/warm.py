"""Imports of a run, made once, in the process from which the runs of a study are forked; nothing else imports this.

No thread is started here and no arithmetic done: a fork has neither.
"""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module

# A terminal and Slurm signal whole process groups; runs are told what to do by whoever started them.
os.setsid()
for stream in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)

PATH = tuple(sys.path)
"""Places of modules, without the working folder, which may be the first of the study's."""

for module in (
    "exgrpo_cli.training.run",
    "exgrpo_cli.show.statistics",
    "transformers.models.llama.modeling_llama",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    # Which transformers imports, where it is installed, to save a model.
    "deepspeed",
):
    # What cannot be imported is named by the run that needs it, in its log.
    with suppress(Exception):
        import_module(module)

# What was imported stays: no collection of a run looks through it, or copies its pages by that.
gc.freeze()
