"""Shipped presets: TOML files of settings for backbones, methods, benchmarks and regimes, and claims about them.

A preset holds sections of settings and, for people and for the memory plan, one `[about]` table that is no setting.
A method's `[published]` holds, section by section, what its paper changed besides its replay (`--as-published`).
"""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from exgrpo_cli.base.errors import InputError, nearest

PresetKind = Literal["backbones", "methods", "benchmarks", "regimes", "claims"]
NO_SETTINGS = ("about", "published")
"""Tables of a preset that are no sections of settings."""
KINDS: tuple[PresetKind, ...] = get_args(PresetKind)


def preset_names(kind: PresetKind) -> tuple[str, ...]:
    """Names of the shipped presets of one kind, sorted."""
    folder = files(__name__) / kind
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_preset(kind: PresetKind, name: str) -> dict[str, Any]:
    """The preset as written, `[about]` included.

    Raises InputError naming the nearest preset when there is none of that name.
    """
    names = preset_names(kind)
    if name not in names:
        raise InputError(f"unknown {kind.removesuffix('s')} preset {name!r}.{nearest(name, names)}")
    return tomllib.loads((files(__name__) / kind / f"{name}.toml").read_text(encoding="utf-8"))


def preset_settings(kind: PresetKind, name: str) -> dict[str, Any]:
    """The preset's settings alone: a layer for `exgrpo_cli.config.settings.resolve`.

    Raises InputError as `load_preset` does.
    """
    return {section: values for section, values in load_preset(kind, name).items() if section not in NO_SETTINGS}


def published_draws() -> dict[str, dict[str, Any]]:
    """The draws of held-out questions behind published results, by name: arguments of `layers.build_config`."""
    return tomllib.loads((files(__name__) / "draws.toml").read_text(encoding="utf-8"))


@cache
def about_backbone(source: str) -> dict[str, Any]:
    """The `[about]` of the backbone preset with this `backbone.source`; empty where there is none."""
    presets = (load_preset("backbones", name) for name in preset_names("backbones"))
    return next((preset["about"] for preset in presets if preset["backbone"]["source"] == source), {})


def find_preset(name: str) -> PresetKind:
    """The kind of the preset called `name`.

    Raises InputError naming the nearest preset of any kind.
    """
    for kind in KINDS:
        if name in preset_names(kind):
            return kind
    known = [each for kind in KINDS for each in preset_names(kind)]
    raise InputError(f"unknown preset {name!r}.{nearest(name, known)}")
