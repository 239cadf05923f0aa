"""From layers of TOML to one validated configuration, and back.

`resolve` merges defaults < backbone < regime < method preset < file < options < --set; an unknown key or a wrong type
is refused with the nearest valid name.
"""

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.settings import Config

Layer = Mapping[str, Any]


def resolve(layers: Sequence[tuple[str, Layer]]) -> Config:
    """Merge (name of the layer, {section: {key: value}}) from weakest to strongest into a validated Config.

    Raises InputError naming the layer, the key and the nearest valid one.
    """
    section_types = typing.get_type_hints(Config)
    merged: dict[str, dict[str, Any]] = {name: {} for name in section_types}
    for layer_name, layer in layers:
        for section, values in layer.items():
            if section not in section_types:
                raise InputError(f"{layer_name}: unknown section {section!r}.{nearest(section, list(section_types))}")
            if not isinstance(values, Mapping):
                raise InputError(f"{layer_name}: {section!r} is a section; write {section}.<key> = value.")
            hints = typing.get_type_hints(section_types[section])
            for key, value in values.items():
                if key not in hints:
                    known = [f"{section}.{name}" for name in hints]
                    raise InputError(f"{layer_name}: unknown key {section}.{key}.{nearest(f'{section}.{key}', known)}")
                merged[section][key] = convert(value, hints[key], f"{layer_name}: {section}.{key}")
    return Config(**{name: section_types[name](**values) for name, values in merged.items()})


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
        raise InputError(f"{where} = {value!r} must be {_kind_name(kind)}, not {type(value).__name__}.")
    return value


def _kind_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, str(kind) if isinstance(kind, types.GenericAlias) else kind.__name__)


def parse_assignments(assignments: Sequence[str]) -> Layer:
    """Turn `--set section.key=value` texts into a layer; values are TOML, a bare word is text."""
    import tomllib

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


def to_toml(config: Config) -> str:
    """The configuration as TOML text that `resolve` reads back to an equal Config."""
    import tomli_w

    return tomli_w.dumps(_plain(asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
