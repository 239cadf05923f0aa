"""`exgrpo presets`: listing and resolved presets, for people and for programs."""

import json

from exgrpo_cli.commands import run
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.presets import KINDS, preset_names


def test_the_listing_has_every_preset_with_a_title(capsys):
    assert run(["presets", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert {kind: tuple(sorted(titles)) for kind, titles in listing.items()} == {
        kind: preset_names(kind) for kind in KINDS
    }
    assert [name for titles in listing.values() for name, title in titles.items() if not title] == []
    assert run(["presets"]) == 0
    assert "qwen-math-1.5b" in capsys.readouterr().out


def test_a_backbone_resolved_is_a_configuration_file(tmp_path, capsys):
    assert run(["presets", "qwen-math-1.5b"]) == 0
    text = capsys.readouterr().out
    assert "# licence = " in text
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert build_config(config_file=file) == build_config(backbone="qwen-math-1.5b")


def test_json_carries_what_is_known_about_a_preset_and_its_settings(capsys):
    assert run(["presets", "llama-8b", "--json"]) == 0
    backbone = json.loads(capsys.readouterr().out)
    assert (backbone["kind"], backbone["name"], backbone["about"]["gated"]) == ("backbones", "llama-8b", True)
    assert backbone["settings"]["replay"]["start_threshold"] == 0.0
    assert run(["presets", "aime24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["protocol"]["samples"] == 32
