"""Held-out scores of sampler and trainer and their difference: entry 27 of the lab notebook.

Run as `.venv/bin/python docs/results/sampler/compare.py`. The files are results whose names keep `--results` from
counting them: runs of that time named no source of log-probs where it was the trainer, and one of today names none
where it is the sampler.
"""

from pathlib import Path

import numpy as np

from exgrpo_cli.runs.result import read_result
from exgrpo_cli.studies.endpoints import effect_over_questions, pass_at_1, pass_at_n

FOLDER = Path(__file__).parent

for seeds in (range(400, 408), range(408, 416), range(400, 416)):
    for name, endpoint in (("pass@1", pass_at_1), ("pass@4", pass_at_n)):
        sampler, trainer = (
            np.stack([endpoint(read_result(FOLDER / f"strong-of-the-{arm}-{seed}.json")) for seed in seeds])
            for arm in ("sampler", "trainer")
        )
        effect = effect_over_questions(sampler - trainer, bounds=(-1.0, 1.0))
        print(
            f"seeds {seeds[0]} to {seeds[-1]}, {name}: {trainer.mean():.3f} {sampler.mean():.3f} "
            f"{effect.mean:+.3f} [{effect.low:.3f}, {effect.high:.3f}]"
        )
