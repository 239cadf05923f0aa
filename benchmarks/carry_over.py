"""Decoding steps and CPU seconds that `rollout.carry_over` saves where lengths have a long tail.

    taskset -c 0 python benchmarks/carry_over.py
    taskset -c 0 python benchmarks/carry_over.py --shares 0 0.1 --questions 128 --steps 8

Lengths are log-normal, 1,300 tokens on average of at most 8,192, in proportion 1 to 32; the model is that of the tiny
backbone. A step trains B groups of 8. Counted from the third step on, a step of training: decoding steps, which a GPU
takes as long for whatever the rows; tokens, those read again behind their prompts among them; CPU seconds of sampling,
which follow the tokens; and the share of rows times decoding steps without a rollout.
"""

import argparse
import math
import time

import numpy as np
import torch
from rollout import VOCAB, build_model

from exgrpo_cli.base.types import RolloutRequest, SamplingParams
from exgrpo_cli.engines.generators import places_of
from exgrpo_cli.engines.hf.generator import HFGenerator

GROUP_SIZE, SCALE, WARM_UP = 8, 32, 2
LIMIT = 8192 // SCALE


def lengths(rng: np.random.Generator) -> list[int]:
    drawn = rng.lognormal(math.log(1300) - 0.9**2 / 2, 0.9, GROUP_SIZE)
    return np.clip(drawn / SCALE, 1, LIMIT).astype(int).tolist()


def measure(share: float, questions: int, steps: int) -> dict[str, float]:
    rng, prompts = np.random.default_rng(0), np.random.default_rng(1)
    under_way = math.ceil(round(questions / (1 - share), 9))
    generator = HFGenerator(build_model(), max_rows=under_way * GROUP_SIZE, eos_ids=[VOCAB])
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=LIMIT)
    pool: list[list[list]] = []
    totals = np.zeros(5)
    for step in range(steps + WARM_UP):
        for _ in range(under_way - len(pool)):
            prompt = prompts.integers(2, VOCAB, 15).astype(np.int32)
            pool.append([[prompt, left] for left in lengths(rng)])
        rows = [row for group in pool for row in group if row[1]]
        # As many tokens are left as the limit leaves behind those that are drawn.
        asked = [
            RolloutRequest(question_id="", prompt_ids=ids, seeds=(step * 10**6 + at,), drawn=LIMIT - left)
            for at, (ids, left) in enumerate(rows)
        ]
        number = {id(row): place for row, place in zip(rows, places_of(asked), strict=True)}
        waited = [{number[id(row)] for row in group if row[1]} for group in pool]
        start = time.process_time()
        found = generator.generate(
            asked, params, enough=lambda ended, waited=waited: sum(own <= ended for own in waited) >= questions
        )
        seconds = time.process_time() - start
        new = [len(group[0].token_ids) for group in found]
        again = sum(len(row[0]) - 15 for row in rows)
        for row, (rollout,) in zip(rows, found, strict=True):
            row[:] = np.concatenate([row[0], rollout.token_ids]), row[1] - len(rollout.token_ids)
        done = [group for group in pool if not any(left for _, left in group)][:questions]
        pool = [group for group in pool if not any(group is own for own in done)]
        if step >= WARM_UP:
            totals += max(new), sum(new), again, seconds, max(new) * len(new)
    means = totals / steps
    return {
        "share": share, "decoding steps": means[0], "tokens": means[1], "read again": means[2], "CPU s": means[3],
        "waiting": 1 - means[1] / means[4],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0, 0.05, 0.1, 0.2, 0.3])
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for share in options.shares:
        print(
            "  ".join(f"{name} {value:.3g}" for name, value in measure(share, options.questions, options.steps).items())
        )


if __name__ == "__main__":
    main()
