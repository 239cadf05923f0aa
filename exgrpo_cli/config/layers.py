"""Layers that make a run's configuration: presets, a file, options and assignments, in that order of strength."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exgrpo_cli.base.errors import InputError, nearest
from exgrpo_cli.config.names import HUB_ID, TINY_TASKS, is_gguf
from exgrpo_cli.config.sections.data import DataSettings
from exgrpo_cli.config.settings import Author, Config, Layer, Written, parse_assignments, parse_toml, resolve
from exgrpo_cli.presets import NO_SETTINGS, load_preset, preset_names, preset_settings

DEFAULT_METHOD = "exgrpo"
TINY = "tiny"
"""The default backbone, and the only one that a regime's start and lengths are measured for."""
JOB = "slurm"
"""Table of a configuration file that is about a cluster's jobs and no part of any run's settings."""
MOST_BYTES = 4 << 20
"""Longest file of settings."""
_CHOSEN_BY_OPTION = {"run.method": "--method", "run.regime": "--regime", "backbone.name": "--backbone"}


def build_config(
    *,
    backbone: str | None = None,
    method: str | None = None,
    regime: str | None = None,
    config_file: Path | None = None,
    options: Layer | None = None,
    assignments: Sequence[str] = (),
    stated: Sequence[Written] = (),
    as_published: bool = False,
    files: Author = Author.FILE,
) -> Config:
    """Resolve defaults < backbone < regime < method preset < config file < options < `--set` into one Config.

    `method` is a preset, or a TOML file of settings, whose name without suffix becomes the method's. `as_published`
    adds what the method's paper changed besides its replay, the `[published]` table. `regime` is a preset that names a
    task, a start and lengths for the tiny backbone. `stated` are layers of others above all: a claim's. `files` is who
    answers for what `config_file` and a method's file say.

    `backbone` is a preset, a local Hugging Face folder or a hub id; without one, the file's, then `tiny`. A folder or
    an id keeps the defaults of the settings, and its last path part becomes the backbone's name. `config_file` may be
    a run folder's `config.toml`: that holds every setting, so the result equals the configuration of that run.

    Raises InputError for an unreadable file, an unknown preset, key or value, for a backbone, method or regime that
    contradicts the one in the file, for a regime with another backbone than `tiny`, and where a file that nobody
    answers for, not the command line, names a function: whoever wrote the file would choose what runs here.
    """
    file_layer = {name: part for name, part in (read_config(config_file) if config_file else {}).items() if name != JOB}
    chosen = read_method(method) if method is not None else None
    own_name = chosen.name if chosen else None
    name = _agreed("--method", own_name, _text(file_layer, "run.method"), config_file) or DEFAULT_METHOD
    if chosen is None and name not in preset_names("methods") and {"replay", "objective"} <= set(file_layer):
        # A configuration made of a method's file holds all of its settings.
        chosen = Method(name, {}, {}, f"method {name}")
    chosen = chosen or read_method(name)
    if regime == "":
        # In a file it says that a run has none.
        load_preset("regimes", regime)
    regime = _agreed("--regime", regime, _text(file_layer, "run.regime"), config_file) or ""
    of_method = files if chosen.is_file else Author.PRESET
    layers = [
        Written("backbone", _backbone_layer(backbone, file_layer, config_file), Author.PRESET),
        Written(f"regime {regime}", preset_settings("regimes", regime) if regime else {}, Author.PRESET),
        Written(chosen.where, chosen.settings, of_method),
        Written(f"published base of {name}", chosen.published if as_published else {}, of_method),
        Written("method", {"run": {"method": name, "regime": regime}}, Author.PRESET),
        Written(str(config_file), file_layer, files),
        Written("options", options or {}, Author.USER),
        Written("--set", checked_assignments(assignments), Author.USER),
        *stated,
    ]
    if as_published and not chosen.published:
        lacks = "has no [published] table, which says what a paper changes besides its replay"
        raise InputError(f"--as-published: method {name} {lacks}, so there is nothing to apply. Leave the option out.")
    config = resolve(_with_derived_defaults(layers))
    if regime and config.backbone.name != TINY:
        contradicts = f"is a start of the {TINY} backbone, not of {config.backbone.name}"
        raise InputError(f"--regime {regime} {contradicts}: leave one of them out.")
    return config


class Method(NamedTuple):
    """A method preset, or a file like one."""

    name: str
    settings: Layer
    published: Layer
    """Settings by section that its paper changed besides its replay."""
    where: str
    """The method as errors name it."""
    is_file: bool = False


def read_method(method: str) -> Method:
    """A method by the name of its preset, or by its file.

    Raises InputError for an unknown preset and a file that cannot be read.
    """
    is_file = method.endswith(".toml")
    content = read_config(Path(method)) if is_file else load_preset("methods", method)
    name = Path(method).stem if is_file else method
    settings = {section: values for section, values in content.items() if section not in NO_SETTINGS}
    if is_file and name in preset_names("methods"):
        raise InputError(f"--method {method}: a preset is called {name} too: give the file another name.")
    published = content.get("published", {})
    if not isinstance(published, dict):
        raise InputError(f"{method}: [published] is a table of sections of settings.")
    return Method(name, settings, published, method if is_file else f"method {name}", is_file)


def read_config(file: Path) -> dict[str, Any]:
    """Read a TOML file of settings.

    Raises InputError naming the file, and the line where it is not TOML.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise InputError(f"{file} is longer than the {MOST_BYTES} bytes of a file of settings.")
        # Editors of Windows begin a file with a byte order mark.
        return parse_toml(content.decode("utf-8-sig"), str(file))
    except OSError as error:
        raise InputError(f"cannot read the configuration {file}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}.") from error


def _backbone_layer(backbone: str | None, file_layer: Layer, config_file: Path | None) -> dict[str, Any]:
    in_file, presets = _text(file_layer, "backbone.name"), preset_names("backbones")
    if backbone is None and in_file is not None and in_file not in presets:
        # A file that names a model of its own (a run's config.toml) carries the source too.
        if _text(file_layer, "backbone.source") is None:
            lacks = "is no preset and backbone.source is missing"
            raise InputError(f"{config_file}: backbone.name = {in_file!r} {lacks}.{nearest(in_file, presets)}")
        return {}
    if backbone is None or backbone in presets:
        name = _agreed("--backbone", backbone, in_file, config_file) or TINY
        layer = preset_settings("backbones", name)
        return {**layer, "backbone": {**layer.get("backbone", {}), "name": name}}
    folder = Path(backbone)
    local = backbone != "" and (folder.is_dir() or (folder.is_file() and is_gguf(backbone)))
    if not local and (folder.is_file() or not HUB_ID.fullmatch(backbone)):
        kinds = "neither a preset, nor a folder, nor a GGUF file, nor a hub id (owner/name)"
        raise InputError(f"backbone {backbone!r} is {kinds}.{nearest(backbone, presets)}")
    # An absolute path, so that the configuration means the same model from any working directory.
    source = str(folder.resolve()) if local else backbone
    _agreed("--backbone", source, _text(file_layer, "backbone.source"), config_file)
    run = Path(source).parent
    is_export = Path(source).name in ("model", "adapter") and (run / "config.toml").is_file()
    name = run_label(run).replace("/", "-") if is_export else Path(source).name
    return {"backbone": {"name": name, "source": source}}


def run_label(run: Path) -> str:
    """Name of a run: its folder's, and of a run of a study `study/arm/seed-N`."""
    run = run.resolve()
    # A study keeps the settings of each run beside its folder.
    in_study = run.with_name(f"{run.name}.toml").is_file()
    return "/".join(run.parts[-3:]) if in_study else run.name


def _with_derived_defaults(layers: list[Written]) -> list[Written]:
    """The layers, with the defaults that follow where one changes the training set alone.

    Held-out questions belong to the set they were named for and become `auto`; the tiny backbone starts from traces of
    the task, where it can.
    """
    train, result = DataSettings().train, []
    for where, layer, author in layers:
        data = layer.get("data")
        if isinstance(data, Mapping) and data.get("train", train) != train:
            train = data["train"]
            layer = {**layer, "data": {"heldout": "auto", **data}}
            if train in TINY_TASKS:
                layer["tiny"] = {"task": train, **layer.get("tiny", {})}
        result.append(Written(where, layer, author))
    return result


def _agreed(option: str, chosen: str | None, in_file: str | None, config_file: Path | None) -> str | None:
    if chosen is not None and in_file is not None and chosen != in_file:
        raise InputError(f"{option} {chosen} contradicts {in_file!r} in {config_file}: leave one of them out.")
    return chosen if chosen is not None else in_file


def _text(layer: Layer, name: str) -> str | None:
    """The value of `section.key` in a layer, where it is a text."""
    section, key = name.split(".")
    values = layer.get(section)
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if isinstance(value, str) else None


def checked_assignments(assignments: Sequence[str]) -> Layer:
    """The layer of `--set` texts. Raises InputError for one of another form, and for what has an option of its own."""
    layer = parse_assignments(assignments)
    for name, option in _CHOSEN_BY_OPTION.items():
        section, key = name.split(".")
        if key in layer.get(section, {}):
            raise InputError(f"--set {name} would change the name but not the preset: use {option}.")
    return layer
