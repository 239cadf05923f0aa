"""From a request to a study: arms, seeds, place, every run resolved, with the result that is known of it.

An axis is a list of arms that differ in one thing: the values of a setting (`--vary`), or methods, metrics and samplers
by their names, each a setting or two. Axes are crossed: an arm takes one value of each. Every arm of a seed and a
regime sees the same questions in the same order, since the question stream has a generator of its own.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from exgrpo_cli.base.errors import InputError, shown
from exgrpo_cli.base.files import require_writable
from exgrpo_cli.config import layers, sections
from exgrpo_cli.config.names import BUILT_IN, DIRECTIONS, GYM, check_functions, section_of_made
from exgrpo_cli.config.requests import StudyRequest
from exgrpo_cli.config.settings import NOT_HASHED, PINNED, Author, Config, Written, resolve
from exgrpo_cli.presets import preset_names, published_draws
from exgrpo_cli.questions.made import make_split
from exgrpo_cli.questions.sources import check_source
from exgrpo_cli.runs.result import RunResult, config_hash, find_results
from exgrpo_cli.studies import study as studies
from exgrpo_cli.studies.claims import FIRST_SEED, Claim, arms_of, chosen_claims, claim_results

STUDIES, CLAIMS = Path("studies"), "claims"
MOST_SEEDS = 1000
SEED_PLACE = "{seed}"
"""In a setting of a study, the seed of each run: `tiny.seed={seed}` gives every seed a warm start of its own."""
DIRECTED = tuple(f":{direction}" for direction in DIRECTIONS)
REPLAY_ONLY = ("replay.", "objective.replay_", "objective.shaping", "objective.importance", "objective.clip_in_mixed")
"""Prefixes of settings that on-policy training does not read."""


def config_of(request: StudyRequest, arm: studies.Arm, seed: int) -> Config:
    """The configuration of one run. Raises InputError for a bad setting."""
    options = {**request.options, "run": {**request.options.get("run", {}), "seed": seed}}
    if request.replay_from is not None:
        replay = layers.read_method(arm.method).settings.get("replay")
        if isinstance(replay, Mapping) and replay.get("store") == "none":
            options["replay"] = {"warm_start": str(Path(request.replay_from).resolve())}
    files = Author.of_file(request.allow_code)
    typed, own = ([_of_seed(text, seed) for text in texts] for texts in (request.assignments, arm.assignments))
    author = files if arm.of_file else Author.USER
    config = layers.build_config(
        backbone=request.backbone,
        method=arm.method,
        regime=arm.regime,
        config_file=request.config_file,
        options=options,
        assignments=typed,
        stated=[Written(f"arm {arm.name}", layers.checked_assignments(own), author)],
        files=files,
    )
    if config.run.seed != seed:
        raise InputError("run.seed: the seeds of a study are those of --seeds or of its claims; leave it out.")
    if not config.data.has_heldout:
        raise InputError("data.heldout = 'none': a study compares held-out pass@1, so name held-out questions.")
    check_functions(config)
    return config


def run_of(request: StudyRequest, arm: studies.Arm, seed: int, study: Path) -> studies.StudyRun:
    """A run of the study in the folder `study`. Raises InputError for a bad setting."""
    folder = study / arm.folder_name / f"seed-{seed}"
    return studies.StudyRun(arm=arm, seed=seed, folder=folder, config=config_of(request, arm, seed))


def plan_request(request: StudyRequest) -> studies.Study:
    """Every run of the study, resolved. Raises InputError naming what is unknown or contradictory."""
    if request.claim is not None:
        for name in ("metric", "sampler", "methods", "regimes", "vary", "seeds", "equal", "replay_from"):
            if getattr(request, name) not in (None, (), []):
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"--claim brings its own arms, regimes, seeds and budgets: leave {option} out.")
        folder = _folder_of(request, [CLAIMS, request.backbone] if request.backbone else [CLAIMS])
        return plan_claims(chosen_claims(request.claim, request.backbone), folder, request)
    axes = [(axis, text) for axis in ("metric", "sampler", "methods") if (text := getattr(request, axis)) is not None]
    axes += [("vary", text) for text in request.vary]
    if not axes:
        axes = [("methods", "exgrpo,grpo") if request.regimes is not None else ("metric", "ent")]
    regimes = [None] if request.regimes is None else studies.split_list("--regimes", request.regimes)
    # Methods differ in what a step costs, values of one setting hardly do.
    usual = "steps" if request.methods is None and request.regimes is None else "generated"
    equal = usual if request.equal is None else request.equal
    sections.require_known("--equal", equal, studies.EQUAL)
    seeds = parse_seeds("3" if request.seeds is None else request.seeds)
    arms_by_axis = [axis_arms(axis, text) for axis, text in axes]
    parts = []
    for (axis, text), arms in zip(axes, arms_by_axis, strict=True):
        # Of methods' files their names alone.
        named = ",".join(arm.name for arm in arms) if axis == "methods" else text
        parts.append(named if axis == "vary" else f"{axis}-{named}")
    folder = _folder_of(request, [*parts, *([f"regimes-{request.regimes}"] if request.regimes else [])])
    return plan_study(folder, cross(arms_by_axis, regimes), seeds, request, equal=equal)


def _folder_of(request: StudyRequest, parts: Sequence[str]) -> Path:
    """Folder of the study, named by `parts` where nothing else names it."""
    if request.name is not None and (request.name in ("", ".", "..") or "/" in request.name):
        raise InputError(f"--name {shown(request.name)} is no name of a folder: leave slashes to --output.")
    if request.output is None:
        return STUDIES / (request.name or re.sub(r"[^A-Za-z0-9._=-]+", "-", "-".join(parts)))
    if request.name not in (None, request.output.name):
        named = f"--output {request.output} names the study {request.output.name!r}, --name {request.name!r}"
        raise InputError(f"{named}: leave one of them out.")
    return request.output


def _of_seed(assignment: str, seed: int) -> str:
    """The assignment with the run's seed for `{seed}`.

    Raises InputError where it says which questions there are: intervals are over questions that all seeds share.
    """
    if SEED_PLACE not in assignment:
        return assignment
    key, equals, value = assignment.partition("=")
    section = key.partition(".")[0].strip()
    if section in ("data", "validation", *map(section_of_made, (*BUILT_IN, GYM))):
        raise InputError(f"{assignment}: seeds are compared on the same held-out questions, so no {section} by seed.")
    return key + equals + value.replace(SEED_PLACE, str(seed))


def axis_arms(axis: str, text: str) -> list[studies.Arm]:
    """Arms of one option of `exgrpo ablate`: "vary", "metric", "sampler" or "methods" with its value.

    One metric without a direction is compared both ways and with a random choice: `ent` is ent:min, ent:max and random.
    Raises InputError for an option without a value; whether names are known is for the configuration to say.
    """
    if axis == "vary":
        key, equals, values = text.partition("=")
        if not equals or "." not in key:
            raise InputError(f"--vary {text!r} is not of the form section.key=value,value.")
        settings = [f"{key}={value}" for value in studies.split_list("--vary", values)]
        return [studies.Arm(name=setting, assignments=(setting,)) for setting in settings]
    names = studies.split_list(f"--{axis}", text)
    if axis == "methods":
        return [studies.Arm(name=Path(name).stem if name.endswith(".toml") else name, method=name) for name in names]
    if axis == "sampler":
        return [studies.Arm(name=name, assignments=(f'replay.sampler="{name}"',)) for name in names]
    if len(names) == 1 and names[0] != "random" and not names[0].endswith(DIRECTED):
        names = [f"{names[0]}:min", f"{names[0]}:max", "random"]
    return [_metric_arm(name) for name in names]


def _metric_arm(text: str) -> studies.Arm:
    """The arm of one metric, lowest first unless it says `:max`; a `python:module:function` keeps its own colons."""
    if text == "random":
        return studies.Arm(name="random", assignments=('replay.metric="random"',))
    metric, _, direction = (text if text.endswith(DIRECTED) else f"{text}:min").rpartition(":")
    settings = (f'replay.metric="{metric}"', f'replay.direction="{direction}"')
    return studies.Arm(name=f"{metric}:{direction}", assignments=settings)


def cross(axes: Sequence[Sequence[studies.Arm]], regimes: Sequence[str | None] = (None,)) -> list[studies.Arm]:
    """Every combination of one arm of each axis, in each regime, with the baselines they are compared with.

    A baseline is on-policy training in the same regime with the same settings, those of replay left out, which it does
    not read. Where a method axis names it, that arm is the baseline; else it stands behind the arms of its regime.
    Raises InputError for two arms of one name.
    """
    plain = [arm.name for axis in axes for arm in axis if arm.method == studies.BASELINE.method and not arm.assignments]
    on_policy = replace(studies.BASELINE, name=plain[0]) if plain else studies.BASELINE
    every: dict[str, studies.Arm] = {}
    for regime in regimes:
        baselines: dict[str, studies.Arm] = {}
        for parts in itertools.product(*axes):
            arm = _joined(parts, regime)
            # A replay setting stands first in its axis: those of a metric are its name and its direction.
            shared = [part for part in parts if part.assignments and not part.assignments[0].startswith(REPLAY_ONLY)]
            baseline = _joined([on_policy, *shared], regime)
            baselines[baseline.name] = replace(baseline, baseline=baseline.name)
            if arm.method == studies.BASELINE.method:
                arm = baseline
            elif arm.name in every:
                raise InputError(f"arm {arm.name!r} is named twice: each arm of a study needs a name of its own.")
            every[arm.name] = replace(arm, baseline=baseline.name)
        every = {**every, **{name: arm for name, arm in baselines.items() if name not in every}}
    return list(every.values())


def _joined(parts: Sequence[studies.Arm], regime: str | None) -> studies.Arm:
    """One arm of several: their names and settings side by side; the method is the one that is not the default."""
    name = " ".join(part.name for part in parts)
    return studies.Arm(
        name=name if regime is None else f"{regime}: {name}",
        method=next((part.method for part in parts if part.method != layers.DEFAULT_METHOD), layers.DEFAULT_METHOD),
        assignments=tuple(text for part in parts for text in part.assignments),
        regime=regime,
    )


def parse_seeds(text: str) -> list[int]:
    """`3` as 0, 1, 2; `0,1,5` as it is. Raises InputError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if "," not in text:
        numbers = list(range(numbers[0])) if numbers and numbers[0] <= MOST_SEEDS else []
    if not numbers:
        forms = f"a number of seeds from 1 to {MOST_SEEDS} nor a list such as 0,1,5"
        raise InputError(f"--seeds {shown(text)} is neither {forms}.")
    return numbers


def plan_study(
    folder: Path,
    arms: Sequence[studies.Arm],
    seeds: Sequence[int] | Mapping[str, Sequence[int]],
    request: StudyRequest = StudyRequest(),
    *,
    equal: str = "steps",
) -> studies.Study:
    """Resolve every run of the study in `folder`; `seeds` are those of all arms, or of each arm by its name.

    Runs whose result lies in one of the request's `results`, or in the study's own `results/`, count as finished.
    Raises InputError for a bad setting, arms whose folders have one name, a folder that holds the run of another
    configuration, or a damaged result.
    """
    require_writable(folder / studies.PLAN_FILE)
    names: dict[str, str] = {}
    for arm in arms:
        if (other := names.setdefault(arm.folder_name, arm.name)) != arm.name:
            raise InputError(f"arms {other!r} and {arm.name!r} would both be in the folder {arm.folder_name}/.")
    of_arm = seeds if isinstance(seeds, Mapping) else {arm.name: seeds for arm in arms}
    runs = [
        run_of(request, arm, seed, folder)
        for seed in sorted({seed for each in of_arm.values() for seed in each})
        for arm in arms
        if seed in of_arm[arm.name]
    ]
    kept = folder / studies.RESULTS_FOLDER
    places = [*([kept] if kept.is_dir() else []), *request.results]
    runs = with_results(runs, [result for place in places for result in find_results(place)], equal)
    study = studies.Study(name=folder.name, folder=folder, arms=tuple(arms), runs=tuple(runs), equal=equal)
    _require_same_settings(study, request)
    for source in {run.config.data.train for run in runs if run.state != "finished"} - set(preset_names("benchmarks")):
        check_source(source)
    return study


def with_results(runs: Sequence[studies.StudyRun], found: Sequence[RunResult], equal: str) -> list[studies.StudyRun]:
    """The runs, each with the result found of it: a run is the hash of its settings, its seed, and where it has a
    budget of its own the amount.

    Arms that differ in nothing that a hash tells, precision say, have none: of them run folders count.
    """
    by_key = {(each.config_hash, each.seed, amount): each for each in found for amount in (each.budget_amount, None)}
    amounts = [run.config.run.budget_amount if equal == "steps" else None for run in runs]
    keys = [(config_hash(expected(run, equal)), run.seed, own) for run, own in zip(runs, amounts, strict=True)]
    times = Counter(keys)
    pairs = zip(runs, keys, strict=True)
    return [replace(run, result=by_key.get(key)) if times[key] == 1 else run for run, key in pairs]


def expected(run: studies.StudyRun, equal: str) -> Config:
    """Settings of a run with the kind of budget that it will have; the amount comes from the baseline's run."""
    if equal == "steps" or run.arm.name == run.arm.baseline:
        return run.config
    return run.given(budget=equal, budget_amount=1.0).config


def _require_same_settings(study: studies.Study, request: StudyRequest) -> None:
    """Raise InputError where the folder holds runs of other settings, of seeds that are planned now or before."""
    planned = {run.folder: run for run in study.runs}
    for arm in study.arms:
        for path in sorted((study.folder / arm.folder_name).glob("seed-*/config.toml")):
            folder, seed = path.parent, path.parent.name.removeprefix("seed-")
            if not seed.isdecimal():
                continue
            wanted = expected(planned.get(folder) or run_of(request, arm, int(seed), study.folder), study.equal)
            stored = resolve([Written(str(path), layers.read_config(path), Author.READ)])
            unlike = config_hash(stored) != config_hash(wanted)
            changed = studies.differing_keys(stored, wanted) - NOT_HASHED - PINNED if unlike else set()
            if wanted.backbone.dtype not in ("auto", stored.backbone.dtype):
                changed.add("backbone.dtype")
            if changed:
                keys = ", ".join(sorted(changed))
                raise InputError(f"{folder} holds a run with another {keys}: choose another --name, or remove it.")


def plan_claims(claims: Sequence[Claim], folder: Path, request: StudyRequest = StudyRequest()) -> studies.Study:
    """The study in `folder` of all arms of the claims, each with the seeds of all claims that it is in.

    Raises InputError as `plan_study` does, where the request has settings that would change what a claim says, and
    where the study was begun with a claim that has changed since; for a claim that has changed since it was fixed, and
    a result that was begun before that.
    """
    backbone = claims[0].terms.backbone and (request.backbone or claims[0].terms.backbone)
    request = replace(request, backbone=backbone or request.backbone)
    named = _named_apart(claims, folder)
    arms: dict[str, studies.Arm] = {}
    begun_for: dict[str, list[Claim]] = defaultdict(list)
    hashes: dict[str, str] = {}
    for claim in claims:
        settings = {}
        for name, arm in arms_of(claim, named).items():
            settings[name] = _stated_hash(claim, arm, request)
            arms[arm.name] = arm
            begun_for[arm.name].append(claim)
        hashes[claim.name] = claim.digest(settings)
        if claim.fixed and claim.fixed.hash != hashes[claim.name]:
            raise InputError(
                f"claim {claim.name} has hash {hashes[claim.name]}, not {claim.fixed.hash}, as it was fixed at "
                f"{claim.fixed.at}: restore what it said, or fix it anew, so that runs begun before do not count."
            )
    # The on-policy arm of the same settings; where no claim has one, an arm is compared with what its claim names.
    names = {arm.identity: arm.name for arm in arms.values()}
    on_policy = {name: own[0].arm(studies.BASELINE.method) for name, own in begun_for.items()}
    every = [replace(arm, baseline=names.get(on_policy[arm.name].identity, "")) for arm in arms.values()]
    seeds = {name: sorted({seed for claim in own for seed in claim.seeds}) for name, own in begun_for.items()}
    study = plan_study(folder, every, seeds, request)
    results = study.results()
    for claim in claims:
        claim_results(claim, study.arms, results)
    of_run = [[each for each in begun_for[run.arm.name] if run.seed in each.seeds] for run in study.runs]
    told = [tuple(f"{claim.name} {hashes[claim.name]}" for claim in own) for own in of_run]
    runs = tuple(run.given(claims=own) for run, own in zip(study.runs, told, strict=True))
    on = {"backbone": backbone} if backbone else {}
    stated = {claim.name: {**claim.stated, "claim": {**claim.stated["claim"], **on}} for claim in claims}
    run_seconds = {name: 60 * own[0].terms.run_minutes for name, own in begun_for.items()}
    return replace(study, runs=runs, claims=stated, run_seconds=run_seconds)


def held_out_before(study: studies.Study) -> list[str]:
    """A line for each draw of made held-out questions that the study has: how many of them published studies held out.

    They are compared by their text: one may have several right answers.
    """
    published = {name: _heldout_draw(layers.build_config(**draw)) for name, draw in published_draws().items()}
    lines = []
    for draw in dict.fromkeys(_heldout_draw(run.config) for run in study.runs):
        if draw[0] in BUILT_IN:
            own = _asked(*draw)
            shared = {name: own & _asked(*other) for name, other in published.items() if other[0] == draw[0]}
            by = "; ".join(f"{len(found)} in {name}" for name, found in shared.items() if found)
            again = len(set().union(*shared.values()))
            lines.append(f"published studies held out {again} of its {len(own)} {draw[0]} questions{by and f' ({by})'}")
    return lines


def _heldout_draw(config: Config) -> tuple[str, Any, int]:
    """Source of the held-out questions, its section if they are made ones, and how many are asked; 0 is all."""
    source = config.data.train if config.data.heldout == "auto" else config.data.heldout
    section = getattr(config, section_of_made(source)) if source in BUILT_IN else None
    return source, section, config.validation.max_questions


@cache
def _asked(source: str, section: Any, most: int) -> frozenset[str]:
    """Texts of the held-out questions of a draw, which are those of any number of training questions."""
    heldout = make_split(source, SimpleNamespace(**{section_of_made(source): replace(section, num_train=1)})).heldout
    return frozenset(each.prompt[-1].content for each in heldout[: most or None])


def _stated_hash(claim: Claim, arm: studies.Arm, request: StudyRequest) -> str:
    """Hash of the settings that the claim says of an arm.

    Raises InputError where it has a bad one, or the request has some that change what the claim says.
    """
    stated = StudyRequest(allow_code=request.allow_code, backbone=claim.terms.backbone)
    theirs = [each for each in request.assignments if claim.terms.backbone and each.startswith("backbone.source=")]
    allowed = replace(stated, backbone=claim.terms.backbone and request.backbone, assignments=theirs)
    try:
        found = config_hash(config_of(stated, arm, FIRST_SEED))
    except InputError as error:
        raise InputError(f"claim {claim.name}, arm {arm.name!r}: {error}") from error
    if config_hash(config_of(request, arm, FIRST_SEED)) != config_hash(config_of(allowed, arm, FIRST_SEED)):
        most = "more than what the machine does (run.threads, run.plots and the like)"
        raise InputError(f"--claim brings its own settings: leave --set and other options out that change {most}.")
    return found


def _named_apart(claims: Sequence[Claim], folder: Path) -> list[studies.Arm]:
    """The arms of the claims, unlike ones by unlike names. A study's arms keep those that an earlier call gave them.

    Of unlike arms of one name the first keeps it; another is called after the first claim that has it.
    """
    arms = {arm.identity: arm for arm in studies.read_plan(folder).arms}
    for claim in claims:
        for arm in claim.arms.values():
            names = {other.name for other in arms.values()}
            name = f"{arm.name} ({claim.name})" if arm.name in names else arm.name
            if arm.identity not in arms and name in names:
                raise InputError(f"{folder} was begun with another claim {claim.name}: choose another --name.")
            arms.setdefault(arm.identity, replace(arm, name=name))
    return list(arms.values())
