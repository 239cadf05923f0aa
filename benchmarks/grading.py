"""How fast, and how robustly, answers are graded: the pool against math-verify called in a loop.

    python benchmarks/grading.py [--workers 2] [--repeats 3] [--deadline 5] [--json]

The corpus has 128 golds of the kinds that MATH-500 has, 48 of them not plain numbers, with 8 rollouts each: 4 correct
ones in different notations and 4 wrong ones, which are correct answers to other questions. It is graded by math-verify
in a loop that parses the gold each time, and by the pool. Then 2 % of the rollouts are replaced by hostile ones.

Start-up (imports, tables of the grammar) is paid before the time is taken, on both sides.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.types import AnswerFormat, Verdict
from exgrpo_cli.config.sections.run import GradingSettings
from exgrpo_cli.grading import GradingItem, GradingPool

# Each gold with two other ways to write it. A quarter are simple fractions, as among those answers of MATH-500 that are
# not plain numbers.
EXPRESSIONS = (
    (r"\frac{17}{42}", r"\dfrac{17}{42}", r"17/42"),
    (r"\frac{23}{9}", r"\frac{46}{18}", r"2\frac{5}{9}"),
    (r"\frac{5}{64}", r"\dfrac{5}{64}", r"0.078125"),
    (r"-\frac{31}{7}", r"\frac{-31}{7}", r"-\dfrac{31}{7}"),
    (r"\frac{3}{11}", r"3/11", r"\frac{3}{ 11 }"),
    (r"\frac 57", r"\frac{5}{7}", r"\tfrac57"),
    (r"\frac38", r"\frac{3}{8}", r"0.375"),
    (r"\dfrac{19}{60}", r"\frac{19}{60}", r"\frac{38}{120}"),
    (r"\frac{361}{144}", r"\left(\frac{19}{12}\right)^2", r"\dfrac{361}{144}"),
    (r"\frac{121}{2}", r"60.5", r"60\frac12"),
    (r"\frac{1}{12}", r"1/12", r"\frac{1}{3}\cdot\frac{1}{4}"),
    (r"\frac{7}{4}", r"1.75", r"p = \frac{7}{4}"),
    (r"-\frac{\pi}{8}", r"\frac{-\pi}{8}", r"-\pi/8"),
    (r"\frac{5\sqrt{7}}{6}", r"\frac{5}{6}\sqrt{7}", r"\frac{5 \sqrt 7}{6}"),
    (r"6\sqrt{11}", r"\sqrt{396}", r"6 \cdot \sqrt{11}"),
    (r"\sqrt{29}", r"29^{1/2}", r"\sqrt {29}"),
    (r"4 - 3i", r"-3i + 4", r"4-3i"),
    (r"\left( 4, \frac{\pi}{3} \right)", r"(4, \frac{\pi}{3})", r"(4,\pi/3)"),
    (r"(3,-8,1)", r"\left(3, -8, 1\right)", r"( 3 , -8 , 1 )"),
    (r"(-2,5]", r"\left(-2, 5\right]", r"( -2, 5 ]"),
    (
        r"(-\infty, 3) \cup (7, \infty)",
        r"(7,\infty)\cup(-\infty,3)",
        r"\left(-\infty,3\right)\cup\left(7,\infty\right)",
    ),
    (r"x \in [-4,11]", r"[-4,11]", r"x\in\left[-4,11\right]"),
    (r"\{2, 5, 9\}", r"\{9,5,2\}", r"2,5,9"),
    (r"4, -7", r"-7, 4", r"4,-7"),
    (r"2 \pm \sqrt{13}", r"2+\sqrt{13}, 2-\sqrt{13}", r"2-\sqrt{13}, 2+\sqrt{13}"),
    (r"x^2 - 5x + 6", r"(x-2)(x-3)", r"6 - 5x + x^2"),
    (r"(a+7)(b-3)", r"ab - 3a + 7b - 21", r"(b-3)(a+7)"),
    (r"9n^2 + 6n + 1", r"(3n+1)^2", r"1+6n+9n^2"),
    (r"7k - 4", r"-4+7k", r"7 k - 4"),
    (r"\frac{13+6a}{15}", r"\frac{6a+13}{15}", r"\frac{13}{15}+\frac{2a}{5}"),
    (
        r"\begin{pmatrix} -2/5 \\ 1/5 \\ 7/5 \end{pmatrix}",
        r"\begin{pmatrix} -\frac{2}{5} \\ \frac{1}{5} \\ \frac{7}{5} \end{pmatrix}",
        r"\begin{bmatrix} -2/5 \\ 1/5 \\ 7/5 \end{bmatrix}",
    ),
    (
        r"\begin{pmatrix} 0 & -1 \\ 1 & 0 \end{pmatrix}",
        r"\begin{bmatrix} 0 & -1 \\ 1 & 0 \end{bmatrix}",
        r"\left(\begin{matrix} 0 & -1 \\ 1 & 0 \end{matrix}\right)",
    ),
    (r"y = 3x - 5", r"y=-5+3x", r"y = 3 x - 5"),
    (r"2x - 9y + 4z - 6 = 0", r"2x-9y+4z=6", r"4z+2x-9y-6=0"),
    (r"135^\circ", r"135^{\circ}", r"135"),
    (r"11\pi", r"11 \pi", r"\pi \cdot 11"),
    (r"25 + 4\pi", r"4\pi + 25", r"25+4 \pi"),
    (r"\frac{3000}{\pi}", r"3000/\pi", r"\dfrac{3000}{\pi}"),
    (r"\tan x", r"\frac{\sin x}{\cos x}", r"\tan(x)"),
    (r"\text{Marta}", r"Marta", r"\text{ Marta }"),
    (r"\text{odd}", r"odd", r"\text{Odd}"),
    (r"\text{(D)}", r"D", r"\text{D}"),
    (r"63_8", r"63_{8}", r"63_8 "),
    (r"2\frac{3}{7}", r"\frac{17}{7}", r"2 \frac{3}{7}"),
    (r"18\mbox{ cm}^2", r"18", r"18\text{ cm}^2"),
    (r"\$47.25", r"47.25", r"\$ 47.25"),
    (r"35\%", r"0.35", r"35 \%"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac12+\frac{\sqrt5}{2}", r"(1+\sqrt{5})/2"),
)
NUM_GOLDS, NUM_ROLLOUTS = 128, 8
HOSTILE = {
    "power tower of Math-Verify issue 65": (
        r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
    ),
    "9^9^9^9": r"\boxed{9^{9^{9^9}}}",
    "100,000 nested braces": r"\boxed{" + "{" * 100_000 + "1" + "}" * 100_000 + "}",
    "a megabyte of digits": r"\boxed{" + "7" * 1_000_000 + "}",
    "binary rubbish": r"\boxed{" + "".join(chr(code) for code in range(1, 256) if chr(code) not in "{}") + "}",
    "an unbalanced box": r"the answer is \boxed{\frac{1}{2",
    "900 nested brackets": r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
}
LABELS = {"loop": "math-verify in a loop", "pool": "pool"}
FORMAT = AnswerFormat(opens_think=True, requires_box=True, require_eos=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One pass over the corpus."""

    seconds: float
    cpu_seconds: float
    """CPU time of all processes together, which a busy machine does not distort."""
    verdicts: list[Verdict]


def plain_numbers(rng: random.Random) -> list[tuple[str, str, str]]:
    """80 integers and decimals with two other ways to write each."""
    numbers: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    while len(numbers) < NUM_GOLDS - len(EXPRESSIONS):
        value = rng.choice([rng.randint(0, 99), rng.randint(-50, 999), rng.randint(1000, 2_000_000)])
        if rng.random() < 0.12:
            notations = (f"{value}.25", f"{value}.250", rf"{value}.25\text{{ m}}")
        elif value < 1000:
            notations = (f"{value}", f"{value}.0", f"n = {value}")
        else:
            notations = (f"{value}", f"{value:,}", rf"{value}\text{{ people}}")
        if notations[0] not in seen:
            seen.add(notations[0])
            numbers.append(notations)
    return numbers


def corpus(rng: random.Random) -> list[GradingItem]:
    """128 golds x 8 rollouts in the order in which a step would grade them: group by group."""
    notations = [*EXPRESSIONS, *plain_numbers(rng)]
    rng.shuffle(notations)
    items = []
    for index, (gold, *others) in enumerate(notations):
        elsewhere = [rng.choice(other) for position, other in enumerate(notations) if position != index]
        right = [gold, *others, rf"\displaystyle {gold}"]
        answers = [*right, *rng.sample(elsewhere, NUM_ROLLOUTS - len(right))]
        rng.shuffle(answers)
        items += [item(gold, rf"\boxed{{{answer}}}") for answer in answers]
    return items


def warm_up(rng: random.Random) -> list[GradingItem]:
    """Answers of the same kinds as the corpus, none of them in it: both sides grade these before the time is taken."""
    forms = (r"\frac{%d}{%d}", r"%d\sqrt{%d}", "(%d,%d]", r"x^3 - %dx + %d", r"\{%d, %d\}", r"%d - %di", "y = %dx + %d")
    answers = [form % (rng.randint(101, 199), rng.randint(201, 299)) for form in forms for _ in range(12)]
    return [item(rng.choice(answers), rf"\boxed{{{answer}}}") for answer in answers]


def item(gold: str, answer: str) -> GradingItem:
    """A response as a reasoning model would write it, with `answer` after the thinking."""
    response = f"Let me think about {{this}}.</think>\nPutting it together, the result is ${answer}$."
    return GradingItem(gold=gold, response=response, finished=True, answer_format=FORMAT)


def with_hostile(items: Sequence[GradingItem], rng: random.Random) -> list[GradingItem]:
    """2 % of the rollouts replaced, every kind of hostile answer among them."""
    replaced = list(items)
    kinds = list(HOSTILE.values())
    for number, index in enumerate(rng.sample(range(len(items)), round(0.02 * len(items)))):
        replaced[index] = item(items[index].gold, kinds[number % len(kinds)])
    return replaced


def loop(items: Sequence[GradingItem]) -> Outcome:
    """math-verify as its README calls it, on the text after `</think>`."""
    from math_verify import parse, verify

    began, cpu_before = time.perf_counter(), cpu_seconds()
    verdicts = []
    for each in items:
        gold = parse(rf"\boxed{{{each.gold}}}")
        answer = parse(each.response.partition("</think>")[2])
        verdicts.append(Verdict.CORRECT if verify(gold, answer) else Verdict.WRONG)
    return outcome(began, cpu_before, verdicts)


def pooled(items: Sequence[GradingItem], pool: GradingPool) -> Outcome:
    """One pass of a pool, its workers warm."""
    pool.grade(warm_up(random.Random(2)))
    began, cpu_before = time.perf_counter(), cpu_seconds()
    verdicts = pool.grade(items)
    return outcome(began, cpu_before, verdicts)


def outcome(began: float, cpu_before: float, verdicts: list[Verdict]) -> Outcome:
    """The pass that ends now."""
    return Outcome(seconds=time.perf_counter() - began, cpu_seconds=cpu_seconds() - cpu_before, verdicts=verdicts)


def new_pool(arguments: argparse.Namespace) -> GradingPool:
    """A pool of math-verify workers."""
    return GradingPool(GradingSettings(workers=arguments.workers, deadline_seconds=arguments.deadline, memory_mb=512))


class ProcessTree:
    """Memory of this process and its descendants, sampled while a block runs; afterwards, which of them still live."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._pids: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "ProcessTree":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def leaked(self) -> int:
        """Descendants seen that are still alive."""
        return sum(Path("/proc", str(pid)).exists() for pid in self._pids)

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            pids = descendants(os.getpid())
            self._pids.update(pids)
            self.peak_bytes = max(self.peak_bytes, sum(proportional_bytes(pid) for pid in [os.getpid(), *pids]))


def descendants(root: int) -> list[int]:
    """Process ids of all descendants of `root`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds() -> float:
    """CPU time that this process and its living descendants have used."""
    ticks = 0
    for pid in [os.getpid(), *descendants(os.getpid())]:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int) -> int:
    """Memory of a process, shared pages divided by the number of their users."""
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def compare_speed(items: list[GradingItem], arguments: argparse.Namespace) -> dict[str, Any]:
    """Median times of loop and pool, interleaved, and verdicts that differ."""
    loops, pools = [], []
    loop(warm_up(random.Random(2)))
    for _ in range(arguments.repeats):
        loops.append(loop(items))
        with new_pool(arguments) as pool:
            pools.append(pooled(items, pool))
    expected = [verdict is Verdict.CORRECT for verdict in loops[0].verdicts]
    passes = {"loop": loops, "pool": pools}
    seconds = {name: statistics.median(each.seconds for each in found) for name, found in passes.items()}
    cpu = {name: statistics.median(each.cpu_seconds for each in found) for name, found in passes.items()}
    return {
        "rollouts": len(items),
        "correct": sum(expected),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "speedup": seconds["loop"] / seconds["pool"],
        "different_verdicts": sum(
            (verdict is Verdict.CORRECT) is not right
            for each in pools
            for verdict, right in zip(each.verdicts, expected, strict=True)
        ),
    }


def survive_hostile(items: list[GradingItem], clean_seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Time, memory and processes left of a pass with hostile answers, beside the bound on its time."""
    mixed = with_hostile(items, random.Random(1))
    with ProcessTree() as tree, new_pool(arguments) as pool:
        passed = pooled(mixed, pool)
    late = {each.response for each, verdict in zip(mixed, passed.verdicts, strict=True) if verdict is Verdict.TIMEOUT}
    bound = 1.2 * clean_seconds + math.ceil(len(late) / arguments.workers) * arguments.deadline + 1.0
    hostile = [verdict for each, clean, verdict in zip(mixed, items, passed.verdicts, strict=True) if each is not clean]
    return {
        "hostile": len(hostile),
        "distinct_late": len(late),
        "verdicts": {verdict.value: hostile.count(verdict) for verdict in Verdict if verdict in hostile},
        "seconds": passed.seconds,
        "bound_seconds": bound,
        "within_bound": passed.seconds <= bound,
        "peak_memory_bytes": tree.peak_bytes,
        "leaked_processes": tree.leaked(),
    }


def main() -> int:
    """0 where verdicts agree, hostile answers stay within their bound and no process is left, else 1."""
    parser = argparse.ArgumentParser(description="Speed and robustness of grading.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds per answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()

    items = corpus(random.Random(0))
    speed = compare_speed(items, arguments)
    seconds, cpu = speed["seconds"], speed["cpu_seconds"]
    hostile = survive_hostile(items, seconds["pool"], arguments)
    if arguments.json:
        print(json.dumps({"workers": arguments.workers, "clean": speed, "hostile": hostile}))
    else:
        print(f"{speed['rollouts']} rollouts, {speed['correct']} correct, {arguments.workers} workers")
        print("                                wall       CPU")
        for name, label in LABELS.items():
            speedup = seconds["loop"] / seconds[name]
            print(f"  {label:<24} {seconds[name]:7.2f} s {cpu[name]:7.2f} s   {speedup:.1f} x")
        print(f"  different verdicts       {speed['different_verdicts']:7d}")
        print(f"with {hostile['hostile']} hostile rollouts: {hostile['verdicts']}")
        print(f"  time                     {hostile['seconds']:7.2f} s  (bound {hostile['bound_seconds']:.2f} s)")
        print(f"  peak memory              {hostile['peak_memory_bytes'] / 2**20:7.0f} MiB")
        print(f"  leaked processes         {hostile['leaked_processes']:7d}")
    ok = speed["different_verdicts"] == 0 and hostile["within_bound"] and hostile["leaked_processes"] == 0
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
