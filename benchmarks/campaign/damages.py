"""Damages drawn at random, over every kind of file that the program leaves and reads again.

    python benchmarks/campaign/damages.py --count 700 --seed 1        # all targets, their share of the count
    python benchmarks/campaign/damages.py --only resume --count 50

A trial copies a whole folder, damages one thing in it, and runs the command that reads it. Its class:

healed   exit code 0 and the result of the undamaged folder
told     exit code 0, another result, and a line that names what is damaged
other    the same of a file that its user writes, in which another value is another wish (read by hand)
named    another exit code, and a line that names what is damaged
vague    another exit code, and a line that does not name it (read by hand)
ugly     a traceback, "unexpected", a signal, no line at all
silent   exit code 0, another result, and not a word
lost     what was not damaged is not as it was, after a command that only reads or refuses
"""

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harm import damage
from processes import Finding, campaign, exgrpo, parser_of, trials_of
from results import digest
from targets import TARGETS, Target, build

BAD = ("ugly", "silent", "vague", "lost")


def prepare(target: Target, whole: Path, work: Path) -> None:
    """Copy what the target's command reads, and no more: copies take time."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in (Path(target.under).parts[0], *target.beside):
        own = whole / name
        shutil.copytree(own, work / name, symlinks=True) if own.is_dir() else shutil.copy(own, work)


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files at or below a folder, locks and figures apart; of a link what it leads to."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        elif path.is_file() and "lock" not in path.name and path.suffix not in (".png", ".svg", ".pdf"):
            found[str(path)] = digest(path)
    return found


def draws_in(number: int) -> bool:
    """Whether a trial draws its figures, which takes most of the time: one in twenty does."""
    return number % 20 == 0


def right(target: Target, whole: Path, work: Path, draws: bool) -> Any:
    """The result of the folder as it is."""
    prepare(target, whole, work)
    outcome = exgrpo(list(target.command), work, draws=draws, EXGRPO_CACHE=str(work / target.cache))
    assert outcome.code == 0, (target.name, outcome.err)
    return target.result(work, outcome)


def trial(target: Target, whole: Path, work: Path, number: int, seed: int, wanted: Any) -> Finding:
    """Damage a fresh copy, run the command, and class what came."""
    rng = random.Random(f"{seed} {target.name} {number}")
    prepare(target, whole, work)
    what, names = damage(work / target.under, rng, target.spared)
    folder = work / Path(target.under).parts[0]
    before = {name: content for name, content in contents(folder).items() if Path(name).name != names[0]}
    outcome = exgrpo(list(target.command), work, draws=draws_in(number), EXGRPO_CACHE=str(work / target.cache))
    result = target.result(work, outcome)
    after = contents(folder) if target.reads or outcome.code == 2 else before
    named = any(name in outcome.err for name in names)
    if ugly := outcome.ugly:
        verdict, line = "ugly", f"[{ugly}] {outcome.err.strip()[-300:]}"
    else:
        if outcome.code:
            verdict = "named" if named else "vague"
        elif result == wanted:
            verdict = "healed"
        else:
            verdict = "told" if named else "other" if target.authored else "silent"
        line = next((line for line in reversed(outcome.err.splitlines()) if line.startswith("exgrpo: ")), "")[:300]
    if changed := [name for name, content in before.items() if after.get(name) != content]:
        verdict, line = "lost", f"{changed[0]} is not as it was. {line}"
    return Finding(number, f"{target.name}: {what}", verdict, outcome.code, line)


def main() -> None:
    parser = parser_of(__doc__, 700, "trials")
    parser.add_argument("--only", choices=[target.name for target in TARGETS], help="all trials on this target")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="exgrpo-damages-") as name:
        whole, work = options.folder or Path(name, "whole"), Path(name, "work")
        if not whole.is_dir():
            whole.mkdir(parents=True)
            build(whole)
        defects = 0
        for target in TARGETS:
            if options.only not in (None, target.name):
                continue
            count = options.count if options.only else max(1, round(options.count * target.share))
            numbers = trials_of(options, count)
            rights = {draws: right(target, whole, work, draws) for draws in sorted(set(map(draws_in, numbers)))}
            defects += campaign(
                target.name,
                options,
                numbers,
                lambda number, own=target, known=rights: trial(
                    own, whole, work, number, options.seed, known[draws_in(number)]
                ),
                BAD,
            )
    raise SystemExit(bool(defects))


if __name__ == "__main__":
    main()
