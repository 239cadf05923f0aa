"""Which layers make a run's configuration: presets, a file, options and assignments, in that order of strength."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.functions import USER_FUNCTIONS, origin
from exgrpo_cli.config.names import PREFIX, TINY_TASKS, is_gguf
from exgrpo_cli.config.resolve import Layer, parse_assignments, resolve
from exgrpo_cli.config.sections.data import DataSettings
from exgrpo_cli.config.settings import Config
from exgrpo_cli.presets import load_preset, preset_names, preset_settings

DEFAULT_BACKBONE = "tiny"
DEFAULT_METHOD = "exgrpo"
REGIME_BACKBONE = "tiny"
"""The only backbone that a regime's start and lengths are measured for."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_CHOSEN_BY_OPTION = {
    ("run", "method"): "--method",
    ("run", "regime"): "--regime",
    ("backbone", "name"): "--backbone",
}


JOB = "slurm"
"""Table of a configuration file that is about a cluster's jobs and no part of any run's settings."""


def build_config(
    *,
    backbone: str | None = None,
    method: str | None = None,
    regime: str | None = None,
    config_file: Path | None = None,
    options: Layer | None = None,
    assignments: Sequence[str] = (),
    as_published: bool = False,
    allow_code: bool = False,
) -> Config:
    """Resolve defaults < backbone < regime < method preset < config file < options < `--set` into one Config.

    `method` is a preset, or a TOML file of settings, whose name without suffix becomes the method's. `as_published`
    adds what the method's paper changed besides its replay, the `[published]` table. `allow_code` lets a method's file
    name functions to run (`python:module:function`). `regime` is a preset that names a task, a start and lengths for
    the tiny backbone.

    `backbone` is a preset, a local Hugging Face folder or a hub id; without one, the file's, then `tiny`. A folder or
    an id keeps the defaults of the settings, and its last path part becomes the backbone's name. `config_file` may be
    a run folder's `config.toml`: that holds every setting, so the result equals the configuration of that run.

    Raises InputError for an unreadable file, an unknown preset, key or value, for a backbone, method or regime that
    contradicts the one in the file, for a regime with another backbone than `tiny`, and where the file, not the command
    line, names a function of the user and `allow_code` is off: whoever wrote the file would choose what runs here.
    """
    file_layer = {name: part for name, part in (read_config(config_file) if config_file else {}).items() if name != JOB}
    chosen = read_method(method, allow_code=allow_code) if method is not None else None
    in_file = _in_layer(file_layer, "run", "method")
    name = _agreed("--method", chosen.name if chosen else None, in_file, config_file)
    name = DEFAULT_METHOD if name is None else name
    if chosen is None:
        chosen = _method_of_file(name, file_layer)
    in_file = _in_layer(file_layer, "run", "regime")
    if regime is not None:
        load_preset("regimes", regime)
    regime = _agreed("--regime", regime, in_file, config_file) or ""
    given = [("options", options or {}), ("--set", _checked_assignments(assignments))]
    layers = [
        ("backbone", _backbone_layer(backbone, file_layer, config_file)),
        (f"regime {regime}", preset_settings("regimes", regime) if regime else {}),
        (f"method {name}", chosen.settings),
        (f"published base of {name}", chosen.published_base() if as_published else {}),
        ("method", {"run": {"method": name, "regime": regime}}),
        (str(config_file), file_layer),
        *given,
    ]
    config = resolve(_with_what_follows(layers))
    if regime and config.backbone.name != REGIME_BACKBONE:
        raise InputError(
            f"--regime {regime} is a start of the {REGIME_BACKBONE} backbone, not of {config.backbone.name}: leave one "
            "of them out."
        )
    if not allow_code:
        _refuse_code(config_file, file_layer, [layer for _, layer in given])
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method preset, or a file like one."""

    name: str
    settings: Layer
    published: Layer
    """What its paper changed besides its replay, by section."""

    def published_base(self) -> Layer:
        """Raises InputError where the method has none."""
        if not self.published:
            raise InputError(
                f"--as-published: method {self.name} has no [published] table, which says what a paper changes besides "
                "its replay, so there is nothing to apply. Leave the option out."
            )
        return self.published


def read_method(method: str, *, allow_code: bool = False) -> Method:
    """A method by the name of its preset, or by its file.

    Raises InputError for an unknown preset, a file that cannot be read, and one that names functions to run, unless
    `allow_code`.
    """
    if not method.endswith(".toml"):
        return _split_method(method, load_preset("methods", method))
    found = _split_method(Path(method).stem, read_config(Path(method)))
    if found.name in preset_names("methods"):
        raise InputError(f"--method {method}: a preset is called {found.name} too: give the file another name.")
    functions = [
        f"{section}.{key} = {value!r}"
        for section, values in found.settings.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
        if isinstance(value, str) and value.startswith(PREFIX)
    ]
    if functions and not allow_code:
        raise InputError(f"--method {method} runs code of yours ({', '.join(functions)}): add --allow-code to let it.")
    return found


def _split_method(name: str, content: Layer) -> Method:
    settings = {section: values for section, values in content.items() if section not in ("about", "published")}
    return Method(name=name, settings=settings, published=content.get("published", {}))


def _method_of_file(name: str, file_layer: Layer) -> Method:
    """The preset that a configuration names; none where it is of a method's file, and holds all of its settings."""
    if name not in preset_names("methods") and {"replay", "objective"} <= set(file_layer):
        return Method(name=name, settings={}, published={})
    return read_method(name)


def read_config(file: Path) -> dict[str, Any]:
    """Read a TOML file of settings.

    Raises InputError naming the file, and the line where it is not TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the configuration {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}.") from error


def _backbone_layer(backbone: str | None, file_layer: Layer, config_file: Path | None) -> dict[str, Any]:
    in_file = _in_layer(file_layer, "backbone", "name")
    if backbone is None:
        if in_file is None or in_file in preset_names("backbones"):
            return _preset_backbone(in_file or DEFAULT_BACKBONE)
        # A file that names a model of its own (a run's config.toml) carries the source too.
        if _in_layer(file_layer, "backbone", "source") is None:
            raise InputError(
                f"{config_file}: backbone.name = {in_file!r} is no preset and backbone.source is missing."
                f"{nearest(in_file, preset_names('backbones'))}"
            )
        return {}
    if backbone in preset_names("backbones"):
        _agreed("--backbone", backbone, in_file, config_file)
        return _preset_backbone(backbone)
    folder = Path(backbone)
    local = backbone != "" and (folder.is_dir() or (folder.is_file() and is_gguf(backbone)))
    if not local and not _HUB_ID.fullmatch(backbone):
        raise InputError(
            f"backbone {backbone!r} is neither a preset, nor a folder, nor a GGUF file, nor a hub id (owner/name)."
            f"{nearest(backbone, preset_names('backbones'))}"
        )
    # An absolute path, so that the configuration means the same model from any working directory.
    source = str(folder.resolve()) if local else backbone
    _agreed("--backbone", source, _in_layer(file_layer, "backbone", "source"), config_file)
    run = Path(source).parent
    is_export = Path(source).name == "model" and (run / "config.toml").is_file()
    return {
        "backbone": {"name": run_label(run).replace("/", "-") if is_export else Path(source).name, "source": source}
    }


def run_label(run: Path) -> str:
    """What a run is called: its folder's name, and of a run of a study `study/arm/seed-N`."""
    run = run.resolve()
    # A study keeps the settings of each run beside its folder.
    in_study = run.with_name(f"{run.name}.toml").is_file()
    return "/".join(run.parts[-3:]) if in_study else run.name


def _refuse_code(file: Path | None, file_layer: Layer, given: Sequence[Layer]) -> None:
    for setting in USER_FUNCTIONS:
        section, key = setting.split(".")
        value = _in_layer(file_layer, section, key) or ""
        if value.startswith(PREFIX) and not any(key in layer.get(section, {}) for layer in given):
            raise InputError(
                f"{file}: {setting} = {value!r} would run code of {origin(setting, value)}. If you trust it, add "
                "--allow-code."
            )


def _with_what_follows(layers: list[tuple[str, Layer]]) -> list[tuple[str, Layer]]:
    """What follows the training set where a layer changes that one alone.

    Held-out questions belong to the set they were named for and become `auto`; the tiny backbone starts from traces of
    the task, where it can.
    """
    train, result = DataSettings().train, []
    for name, layer in layers:
        data = layer.get("data")
        if isinstance(data, Mapping) and data.get("train", train) != train:
            train = data["train"]
            layer = {**layer, "data": {"heldout": "auto", **data}}
            if train in TINY_TASKS:
                layer["tiny"] = {"task": train, **layer.get("tiny", {})}
        result.append((name, layer))
    return result


def _preset_backbone(name: str) -> dict[str, Any]:
    layer = preset_settings("backbones", name)
    return {**layer, "backbone": {**layer.get("backbone", {}), "name": name}}


def _agreed(option: str, chosen: str | None, in_file: str | None, config_file: Path | None) -> str | None:
    if chosen is not None and in_file is not None and chosen != in_file:
        raise InputError(f"{option} {chosen} contradicts {in_file!r} in {config_file}: leave one of them out.")
    return chosen if chosen is not None else in_file


def _in_layer(layer: Layer, section: str, key: str) -> str | None:
    values = layer.get(section)
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, str) else None


def _checked_assignments(assignments: Sequence[str]) -> Layer:
    layer = parse_assignments(assignments)
    for (section, key), option in _CHOSEN_BY_OPTION.items():
        if key in layer.get(section, {}):
            raise InputError(f"--set {section}.{key} would change the name but not the preset: use {option}.")
    return layer
