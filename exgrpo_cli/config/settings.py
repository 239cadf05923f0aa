"""Settings of a run: frozen sections, each documented under its fields and validated by itself; from TOML and back.

`resolve` merges tables from weakest to strongest; an unknown key or a wrong type is refused with the nearest name.
"""

import functools
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.sections.data import (
    ArithmeticSettings,
    CountdownSettings,
    DataSettings,
    GymSettings,
    ModularSettings,
    WordProblemSettings,
)
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.config.sections.run import (
    BackboneSettings,
    GradingSettings,
    OptimSettings,
    RolloutSettings,
    RunSettings,
    TinySettings,
    ValidationSettings,
)
from exgrpo_cli.replay.append import Append
from exgrpo_cli.replay.join import Join
from exgrpo_cli.replay.refill import Refill
from exgrpo_cli.replay.replace import Replace

Layer = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run is made of; written to `config.toml` before step 1."""

    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    arithmetic: ArithmeticSettings = field(default_factory=ArithmeticSettings)
    word_problems: WordProblemSettings = field(default_factory=WordProblemSettings)
    countdown: CountdownSettings = field(default_factory=CountdownSettings)
    modular: ModularSettings = field(default_factory=ModularSettings)
    gym: GymSettings = field(default_factory=GymSettings)
    backbone: BackboneSettings = field(default_factory=BackboneSettings)
    tiny: TinySettings = field(default_factory=TinySettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    grading: GradingSettings = field(default_factory=GradingSettings)
    replay: Replace | Join | Append | Refill = field(default_factory=Replace)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    validation: ValidationSettings = field(default_factory=ValidationSettings)

    @property
    def usual_logprobs(self) -> Literal["sampler", "trainer"]:
        """Meaning of `rollout.logprobs = "auto"`: the sampler's where they were found to be the trainer's."""
        in_float32_on_a_cpu = self.run.device != "cuda" and self.backbone.dtype != "bfloat16"
        alike = self.rollout.engine == "hf" and self.optim.engine == "torch" and in_float32_on_a_cpu
        return "sampler" if alike else "trainer"

    def settled_schedule(self) -> dict[str, Any]:
        """Horizon and warm-up of the learning rate as a run settles them: a decay, or another budget than steps, ends
        with the run unless told otherwise, and warms up for at most half of a decay."""
        optim, steps = self.optim, self.run.steps
        if optim.horizon or (optim.schedule == "constant" and self.run.budget == "steps"):
            return {"horizon": optim.horizon, "warmup_steps": optim.warmup_steps}
        most = optim.warmup_steps if optim.schedule == "constant" else steps // 2
        return {"horizon": steps, "warmup_steps": min(optim.warmup_steps, most)}

    def __post_init__(self) -> None:
        for holds, first, second, advice in _contradictions(self):
            if holds:
                stated = [f"{name} = {value_of(self, name)!r}" for name in (first, second)]
                raise InputError(f"{stated[0]} contradicts {stated[1]}: {advice}.")


def value_of(config: Config, name: str) -> Any:
    """The value of `section.key`."""
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _contradictions(config: Config) -> Iterator[tuple[bool, str, str, str]]:
    """Whether settings of different sections contradict each other, their names, the reason and what to use instead.

    Keys of one section are checked by its own type, which for `replay` depends on the place.
    """
    replay, rollout, objective = config.replay, config.rollout, config.objective
    # What is stored and when a question retires acts without replay too; K and B are of the rollouts.
    yield (
        replay.upper_bound >= rollout.group_size and replay.retirement,
        *("replay.upper_bound", "replay.retirement"),
        "a question that all K solve retires before it stores; use an upper_bound below K, or replay.retirement = "
        "false",
    )
    yield (
        replay.lower_bound >= replay.upper(rollout.group_size),
        *("replay.lower_bound", "replay.upper_bound"),
        "no success count is between them, and a visit stores when lower_bound < k <= upper_bound; lower the one or "
        "raise the other (-1 is K - 1)",
    )
    yield (
        config.optim.minibatches > rollout.questions_per_step,
        *("optim.minibatches", "rollout.questions_per_step"),
        "a mini-batch holds at least one whole group; use at most as many mini-batches as questions",
    )
    if not replay.enabled:
        return
    # Both sections are whole without the other: what rewards are compared with, and whether anything is replayed.
    yield (
        objective.baseline == "history",
        *("objective.baseline", "replay.enabled"),
        "a replayed success is no visit of the current policy; set replay.enabled = false, or use baseline = 'group'",
    )
    # Rounds of fresh questions serve every other place.
    yield (
        isinstance(replay, Refill) and rollout.max_rounds > 1,
        *("replay.composition", "rollout.max_rounds"),
        "both fill the places of groups that are not mixed; leave rollout.max_rounds at 1, or use another composition",
    )
    yield (
        isinstance(replay, Replace) and replay.per_question >= rollout.group_size,
        *("replay.per_question", "rollout.group_size"),
        "a replaced question needs at least one fresh rollout; use fewer than K, or composition = 'join'",
    )
    # The loss of a replayed token is the objective's, so that one study can hold it equal over all places.
    imitates = objective.replay_surrogate == "likelihood"
    yield (
        imitates and replay.replays_failures,
        *("objective.replay_surrogate", "replay.store"),
        "failures would be imitated; use store = 'successes' and rows, not groups, or another surrogate",
    )
    yield (
        imitates and isinstance(replay, Append | Refill) and replay.bias_correction != 0,
        *("objective.replay_surrogate", "replay.bias_correction"),
        "the correction weighs advantages, which -log pi does not have; leave bias_correction at 0, or use another "
        "surrogate",
    )


def resolve(layers: Sequence[tuple[str, Layer]]) -> Config:
    """Merge (name of the layer, {section: {key: value}}) from weakest to strongest into a validated Config.

    Raises InputError naming the layer, the key and the nearest valid one.
    """
    for where, layer in layers:
        for section in layer:
            if section not in SECTIONS:
                raise InputError(f"{where}: unknown section {section!r}.{nearest(section, list(SECTIONS))}")
    sections = {}
    for name, kinds in SECTIONS.items():
        sections[name] = read_section(name, kinds, [(where, layer[name]) for where, layer in layers if name in layer])
    return Config(**sections)


def read_section(section: str, kinds: tuple[type, ...], tables: Sequence[tuple[str, Any]]) -> Any:
    """One section from its tables (name of the layer, {key: value}), the weakest first.

    Of several `kinds` the tables pick one, by the key that is a single Literal in each (`composition`); the first
    without it. Where a stronger table picks another kind, keys of the one before go with it; a section that is not
    `enabled` reads none of the keys that other kinds have. Raises InputError naming the table, the key and the nearest
    valid one, or the kinds that take it.
    """
    for where, table in tables:
        if not isinstance(table, Mapping):
            raise InputError(f"{where}: {section!r} is a section; write {section}.<key> = value.")
    picked = _picked(section, kinds, tables)
    kind = picked[-1] if picked else kinds[0]
    hints, given = _hints(kind), {}
    enabled = {key: value for _, table in tables for key, value in table.items()}.get("enabled", True)
    for (where, table), own in zip(tables, picked, strict=True):
        for key, value in table.items():
            others = [other for other in kinds if key in _hints(other)]
            if not others or not (enabled is False or key in hints or key in _hints(own)):
                raise InputError(f"{where}: unknown key {section}.{key}.{_instead(section, key, kind, kinds)}")
            _taken(others, key, value, f"{where}: {section}.{key}")
            given[key] = (value, f"{where}: {section}.{key}")
    values = {key: _taken([kind], key, value, where, kinds) for key, (value, where) in given.items() if key in hints}
    return kind(**values)


def _instead(section: str, key: str, kind: type, kinds: Sequence[type]) -> str:
    """The nearest key that any of `kinds` has, and which of them where this `kind` has not."""
    from difflib import get_close_matches

    known = list(dict.fromkeys(name for each in (kind, *kinds) for name in _hints(each)))
    close = get_close_matches(key, known, n=1, cutoff=0.5)
    having = [each for each in kinds if close and close[0] in _hints(each)]
    if having and kind not in having:
        named = "" if key in known else f" Did you mean {section + '.' + close[0]!r}?"
        return f"{named} It belongs to {_names(having)}, not to {_names([kind])}."
    return nearest(f"{section}.{key}", [f"{section}.{name}" for name in _hints(kind)])


def _taken(kinds: Sequence[type], key: str, value: Any, where: str, others: Sequence[type] = ()) -> Any:
    """The value as one of `kinds` takes it. Raises InputError, naming those of the `others` that would."""
    takers = [kind for kind in (*kinds, *others) if value in _options(_hints(kind).get(key))]
    own = _options(_hints(kinds[0])[key])
    if takers and not set(takers) & set(kinds):
        known = f"{_names(kinds)} takes {' or '.join(map(repr, own))}; {value!r} goes with {_names(takers)}"
        raise InputError(f"{where} = {value!r} is not known here: {known}.")
    return convert(value, _hints(takers[0] if takers else kinds[0])[key], where)


def _picked(section: str, kinds: tuple[type, ...], tables: Sequence[tuple[str, Mapping[str, Any]]]) -> list[type]:
    """The kind that holds from each table on."""
    selector, found = _selector(kinds[0]), []
    by_value = {_options(_hints(kind)[selector])[0]: kind for kind in kinds} if selector else {}
    kind = kinds[0]
    for where, table in tables:
        value = table.get(selector)
        if selector in table and value not in by_value:
            known = nearest(str(value), list(by_value))
            raise InputError(f"{where}: {section}.{selector} = {value!r} is not known.{known}")
        kind = by_value.get(value, kind)
        found.append(kind)
    return found


def _selector(kind: type) -> str:
    """The key that is a single Literal, and tells the kinds of a section apart; empty where there is none."""
    return next((name for name, hint in _hints(kind).items() if len(_options(hint)) == 1), "")


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def _names(kinds: Sequence[type]) -> str:
    """The key and values by which tables pick these kinds."""
    selector = _selector(kinds[0])
    return f"{selector} = " + " or ".join(repr(_options(_hints(kind)[selector])[0]) for kind in kinds)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def convert(value: Any, kind: Any, where: str) -> Any:
    """Check one TOML value against a field's type; integers are accepted for floats, lists for tuples."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        options = typing.get_args(kind)
        if value not in options:
            raise InputError(f"{where} = {value!r} is not known.{nearest(str(value), [str(o) for o in options])}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{where} = {value!r} must be a list.")
        return tuple(convert(item, typing.get_args(kind)[0], where) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        wanted = names.get(kind, str(kind) if isinstance(kind, types.GenericAlias) else kind.__name__)
        raise InputError(f"{where} = {value!r} must be {wanted}, not {type(value).__name__}.")
    return value


def parse_assignments(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Turn `--set section.key=value` texts into a layer; values are TOML, a bare word is text."""
    layer: dict[str, dict[str, Any]] = {}
    for text in assignments:
        name, equals, raw = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise InputError(f"--set {text!r} is not of the form section.key=value.")
        try:
            value = tomllib.loads(f"value = {raw.strip()}")["value"]
        except tomllib.TOMLDecodeError:
            value = raw.strip()
        layer.setdefault(section, {})[key] = value
    return layer


def flat(config: Config) -> dict[str, Any]:
    """{section.key: value} of all settings."""
    return {f"{name}.{key}": value for name, section in asdict(config).items() for key, value in section.items()}


def to_toml(config: Config) -> str:
    """The configuration as TOML text that `resolve` reads back to an equal Config."""
    import tomli_w

    return tomli_w.dumps(asdict(config))


def _kinds(hint: Any) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


SECTIONS: dict[str, tuple[type, ...]] = {name: _kinds(hint) for name, hint in typing.get_type_hints(Config).items()}
"""Each section with its type; a section of several types is picked by a key (`read_section`)."""
_FIELDS = {
    f"{section}.{each.name}": each.metadata
    for section, kinds in SECTIONS.items()
    for kind in kinds
    for each in fields(kind)
}
NOT_HASHED = frozenset(name for name, says in _FIELDS.items() if says.get("role", "science") != "science")
"""Settings that do not say what was trained: which run it was, and what machine and disk were asked for."""
PINNED = frozenset(name for name, says in _FIELDS.items() if says.get("pinned"))
"""Settings that a run settles when it starts: its `config.toml` may differ in them from what was asked for."""
RESUMABLE = frozenset(name for name, says in _FIELDS.items() if says.get("resumable"))
"""Settings that may change when a run goes on."""
