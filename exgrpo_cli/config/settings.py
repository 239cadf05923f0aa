"""Settings of a run: frozen sections, each documented under its fields and validated by itself; from TOML and back.

`resolve` merges tables from weakest to strongest; an unknown key or a wrong type is refused with the nearest name.
"""

import functools
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Literal, NamedTuple

from exgrpo_cli.base.data import tables
from exgrpo_cli.base.errors import InputError, alike, first_line, nearest, shown
from exgrpo_cli.config.names import is_function, label_of, origin
from exgrpo_cli.config.sections import FINITE, check
from exgrpo_cli.config.sections import data as questions
from exgrpo_cli.config.sections import run as runs
from exgrpo_cli.config.sections.objective import ObjectiveSettings
from exgrpo_cli.replay import append, join, prefix, refill, replace, revisit

Layer = Mapping[str, Any]
ROUNDING_GAPS = {"float32": 1e-6, "bfloat16": 5e-3}
"""Mean differences of log-probs, in nats a token, that two engines of the same weights have by rounding alone."""
MOST_INTEGER = 2**63 - 1
"""Greatest whole number of a setting."""


class Author(Enum):
    """Author of settings, who decides whether they may run code: a `python:` function, lines of a job's script."""

    USER = "typed, or of a file or run that the user vouches for"
    PRESET = "shipped with the program"
    FILE = "of a file, whoever wrote it: may run nothing"
    READ = "of a file that is looked at: whoever reads it calls none of its functions"

    @classmethod
    def of_file(cls, allow_code: bool) -> "Author":
        """Author of a file, for which `--allow-code` vouches."""
        return cls.USER if allow_code else cls.FILE


class Written(NamedTuple):
    """Settings with where they stand, as errors name it, and who wrote them."""

    where: str
    settings: Any
    """{section: {key: value}} of a layer, {key: value} of a section."""
    author: Author = Author.FILE


Tables = Sequence[Written | tuple[str, Any]]
"""From the weakest to the strongest; without an author they are a file's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run is made of; written to `config.toml` before step 1."""

    run: runs.RunSettings = field(default_factory=runs.RunSettings)
    data: questions.DataSettings = field(default_factory=questions.DataSettings)
    arithmetic: questions.ArithmeticSettings = field(default_factory=questions.ArithmeticSettings)
    word_problems: questions.WordProblemSettings = field(default_factory=questions.WordProblemSettings)
    countdown: questions.CountdownSettings = field(default_factory=questions.CountdownSettings)
    modular: questions.ModularSettings = field(default_factory=questions.ModularSettings)
    gym: questions.GymSettings = field(default_factory=questions.GymSettings)
    backbone: runs.BackboneSettings = field(default_factory=runs.BackboneSettings)
    tiny: runs.TinySettings = field(default_factory=runs.TinySettings)
    lora: runs.LoraSettings = field(default_factory=runs.LoraSettings)
    rollout: runs.RolloutSettings = field(default_factory=runs.RolloutSettings)
    grading: runs.GradingSettings = field(default_factory=runs.GradingSettings)
    replay: replace.Replace | join.Join | append.Append | refill.Refill | prefix.Prefix | revisit.Revisit = field(
        default_factory=replace.Replace
    )
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optim: runs.OptimSettings = field(default_factory=runs.OptimSettings)
    validation: runs.ValidationSettings = field(default_factory=runs.ValidationSettings)

    @property
    def usual_logprobs(self) -> Literal["sampler", "trainer"]:
        """Meaning of `rollout.logprobs = "auto"`: the sampler's where they were found to be the trainer's."""
        in_float32_on_a_cpu = self.run.device not in ("cuda", "mps") and self.backbone.dtype != "bfloat16"
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
        for name in SECTIONS:
            check(name, getattr(self, name))
        for first, second, advice in contradictions(self):
            values = flat(self)
            raise InputError(f"{first} = {values[first]!r} contradicts {second} = {values[second]!r}: {advice}.")


def contradictions(config: Config) -> Iterator[tuple[str, str, str]]:
    """Settings that contradict each other: the names of two, the reason and what to use instead.

    What a key needs of others of its section is said by its field (`sections.Needs`), and which keys there are by the
    place's type. Left are numbers that bound each other, and pairs of two sections, each of which is whole without the
    other: no type holds both. What is said of each stands in contradictions.toml.
    """
    replay, rollout, objective = config.replay, config.rollout, config.objective
    rounded = config.optim.matmul_dtype == "bfloat16"
    rounding = ROUNDING_GAPS.get("bfloat16" if rounded else config.backbone.dtype, 0.0)
    K, rank, by_adapter = rollout.group_size, config.lora.rank, config.lora.sync == "adapter"
    labels = [*map(label_of, {*config.grading.rewards, config.grading.grader})]
    # What is stored and when a question retires acts without replay too.
    outgrown = replay.retirement and replay.upper_bound >= replay.retires_at(K)
    holds = {
        "retires at": outgrown and bool(replay.retire_at),
        "retires": outgrown and not replay.retire_at,
        "stores nothing": replay.lower_bound >= replay.upper(K),
        "too few groups": config.optim.minibatches > rollout.questions_per_step,
        "rounding": not rounded and 0 < rollout.max_logprob_gap < rounding,
        "rounded matmuls": rounded and 0 < rollout.max_logprob_gap < rounding,
        "sharded adapter": rank > 0 and config.optim.engine == "deepspeed" and config.optim.zero_stage == 3,
        "own weights": by_adapter and rollout.engine == "hf",
        "one label": len(set(labels)) < len(labels),
        "no successes": bool(config.grading.rewards) and objective.baseline == "history",
        "shut out": objective.gate == "unsolved" and rollout.max_rounds > 1,
        "nothing to train": objective.baseline in ("virtual", "confidence") and rollout.max_rounds > 1,
        "forked ranks": bool(config.validation.forks) and config.run.nproc != 1,
        "forked by the clock": bool(config.validation.forks) and config.run.budget == "seconds",
        "rank": by_adapter and rank > runs.VLLM_RANKS[-1],
    }
    if replay.enabled:
        holds |= {
            "nothing fresh": isinstance(replay, replace.Replace) and replay.per_question >= K,
            "never enough": isinstance(replay, join.Join) and 0 < replay.max_per_question < replay.min_stored,
            "never solved": isinstance(replay, prefix.Prefix) and replay.store == "failures" and replay.retirement,
            "waiting rows": rollout.carry_over > 0 and objective.importance == "old",
            "no visit": objective.baseline in ("history", "confidence"),
            "solved before": objective.gate != "none",
            "never rested": isinstance(replay, revisit.Revisit) and 0 < replay.max_age <= replay.cooldown,
            "two fillers": isinstance(replay, refill.Refill) and rollout.max_rounds > 1,
            "imitated": objective.replay_surrogate == "likelihood" and replay.replays_failures,
        }
    for name in filter(holds.get, holds):
        first, second, advice = tables(__file__, "contradictions.toml")[name]
        yield first, second, advice.format(rounding=rounding, most=runs.VLLM_RANKS[-1])


def resolve(layers: Tables) -> Config:
    """Merge layers from weakest to strongest into a validated Config.

    Raises InputError naming the layer, the key and the nearest valid one, and for code where a file's value stands.
    """
    written = [Written(*layer) for layer in layers]
    for where, layer, _ in written:
        if unknown := [section for section in layer if section not in SECTIONS]:
            raise InputError(f"{where}: unknown section {unknown[0]!r}.{nearest(unknown[0], list(SECTIONS))}")
    sections = {}
    for name, kinds in SECTIONS.items():
        tables = [layer._replace(settings=layer.settings[name]) for layer in written if name in layer.settings]
        sections[name] = read_section(name, kinds, tables)
    return Config(**sections)


def read_section(section: str, kinds: tuple[type, ...], tables: Tables) -> Any:
    """One section from its tables, the weakest first.

    Of several `kinds` the tables pick one, by the key that is a single Literal in each (`composition`); the first
    without it. Where a stronger table picks another kind, keys of the one before go with it; a section that is not
    `enabled` reads none of the keys that other kinds have. Raises InputError naming the table, the key and the nearest
    valid one, or the kinds that have it; and for a value that runs code where a file's stands.
    """
    selector = _selector(kinds[0])
    named = {_options(_hints(kind)[selector])[0]: kind for kind in kinds} if selector else {}
    picked = [kinds[0]]
    merged: dict[str, tuple[Any, str, Author, type]] = {}
    for where, table, author in (Written(*each) for each in tables):
        if not isinstance(table, Mapping):
            raise InputError(f"{where}: {section!r} is a section; write {section}.<key> = value.")
        if selector in table and table[selector] not in named:
            instead = nearest(shown(table[selector]), list(named))
            raise InputError(f"{where}: {section}.{selector} = {shown(table[selector])} is not known.{instead}")
        picked.append(named.get(table.get(selector), picked[-1]))
        merged |= {key: (value, where, author, picked[-1]) for key, value in table.items()}
    kind, values = picked[-1], {}
    hints, enabled = _hints(kind), merged["enabled"][0] if "enabled" in merged else True
    for key, (value, where, author, own) in merged.items():
        having = [each for each in kinds if key in _hints(each)]
        takers = [each for each in having if value in _options(_hints(each)[key])]
        if key in hints and (not takers or kind in takers):
            values[key] = convert(value, hints[key], f"{where}: {section}.{key}")
            _refuse_code(kind, f"{section}.{key}", value, where, author)
        elif key in hints:
            raise InputError(f"{where}: {section}.{key} = {shown(value)} is not known.{_belongs(takers, kind)}")
        elif own not in having and not (having and enabled is False):
            known = [f"{section}.{name}" for name in dict.fromkeys(name for each in kinds for name in _hints(each))]
            everywhere = [f"{each}.{name}" for each, kinds in SECTIONS.items() for name in _hints(kinds[0])]
            known = alike(f"{section}.{key}", everywhere) or known
            instead = _belongs(having, kind) if having else nearest(f"{section}.{key}", known)
            raise InputError(f"{where}: unknown key {section}.{key}.{instead}")
    settings = kind(**values)
    check(section, settings)
    return settings


def _refuse_code(kind: type, name: str, value: Any, where: str, author: Author) -> None:
    """Raise InputError where a file's value would run code: the one place that asks who wrote it."""
    if author is not Author.FILE:
        return
    if is_function(value):
        named = next(filter(is_function, value)) if isinstance(value, Mapping) else value
        runs = f"code of {origin(name, named)}"
    elif value and next(each for each in fields(kind) if name.endswith(f".{each.name}")).metadata.get("runs"):
        runs = "it as shell commands"
    else:
        return
    raise InputError(f"{where}: {name} = {shown(value)} would run {runs}. If you trust it, add --allow-code.")


def _belongs(having: Sequence[type], kind: type) -> str:
    """The kinds that a key or value belongs to, by the key and values that pick them, where it is not `kind`."""
    selector = _selector(kind)
    names = [" or ".join(repr(_options(_hints(each)[selector])[0]) for each in kinds) for kinds in (having, [kind])]
    return f" It belongs to {selector} = {names[0]}, not to {selector} = {names[1]}."


def _selector(kind: type) -> str:
    """The key that is a single Literal, and tells the kinds of a section apart; empty where there is none."""
    return next((name for name, hint in _hints(kind).items() if len(_options(hint)) == 1), "")


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def convert(value: Any, kind: Any, where: str) -> Any:
    """Check one TOML value against a field's type; integers are accepted for floats, lists for tuples."""
    form = typing.get_origin(kind)
    if isinstance(value, int) and abs(value) > MOST_INTEGER:
        raise InputError(f"{where} = {shown(value)} is out of range: use a whole number of at most {MOST_INTEGER}.")
    if form is Literal:
        options = typing.get_args(kind)
        if value not in options:
            raise InputError(f"{where} = {shown(value)} is not known.{nearest(shown(value), [*map(str, options)])}")
        return value
    if form is dict:
        if not isinstance(value, Mapping):
            raise InputError(f"{where} = {shown(value)} must be a table, such as {{ NAME = 0.5 }}.")
        table = {name: convert(item, typing.get_args(kind)[1], f"{where}.{name}") for name, item in value.items()}
        for name, item in table.items():
            FINITE.check(f"{where}.{name}", item)
        return table
    if form is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{where} = {shown(value)} must be a list.")
        return tuple(convert(item, typing.get_args(kind)[0], where) for item in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise InputError(f"{where} = {shown(value)} must be {names[kind]}, not {type(value).__name__}.")
    return value


def parse_assignments(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Turn `--set section.key=value` texts into a layer; values are TOML, a bare word is text.

    Raises InputError for a text of another form, or that goes on after its value.
    """
    layer: dict[str, dict[str, Any]] = {}
    for text in assignments:
        name, equals, raw = text.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise InputError(f"--set {shown(text)} is not of the form section.key=value.")
        try:
            table = parse_toml(f"value = {raw.strip()}", f"--set {name.strip()}")
        except tomllib.TOMLDecodeError:
            table = {"value": raw.strip()}
            if not raw.strip().isprintable():
                table[""] = None
        if len(table) > 1:
            raise InputError(f"--set {shown(text)} holds more than one value: give each setting a --set of its own.")
        layer.setdefault(section, {})[key] = table["value"]
    return layer


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Content of a TOML text. Raises TOMLDecodeError as tomllib does, InputError for what tomllib cannot hold."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        what = "lists or tables too deep" if isinstance(error, RecursionError) else "a number that no setting has"
        raise InputError(f"{where} holds {what} ({first_line(error)}): write another value.") from error


def flat(config: Config) -> dict[str, Any]:
    """{section.key: value} of all settings."""
    return {f"{name}.{key}": value for name, section in asdict(config).items() for key, value in section.items()}


def to_toml(config: Config) -> str:
    """The configuration as TOML text that `resolve` reads back to an equal Config."""
    import tomli_w

    return tomli_w.dumps(asdict(config))


SECTIONS: dict[str, tuple[type, ...]] = {
    name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(Config).items()
}
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
