"""Shipped presets: every one loads, says what the paper says, and layers in the documented order."""

import itertools
import tomllib
from pathlib import Path

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config import names, settings
from exgrpo_cli.config.layers import build_config
from exgrpo_cli.presets import load_preset, preset_names, preset_settings

PUBLISHED = ("llama-8b", "llama-8b-instruct", "luffy-7b", "qwen-7b-instruct", "qwen-math-1.5b", "qwen-math-7b")
SMALL = ("qwen2.5-0.5b-instruct", "smollm2-135m", "tiny")
BACKBONES = (*PUBLISHED, *SMALL)

# The paper's ablation arms and what each changes against ExGRPO, as (section, key): value.
ARMS = {
    name: {(section, key): value for section, values in changed.items() for key, value in values.items()}
    for name, changed in tomllib.loads(Path(__file__).with_name("arms.toml").read_text()).items()
}


def saved_and_read(config: settings.Config, folder: Path) -> settings.Config:
    """What a run folder's own configuration gives."""
    (folder / "config.toml").write_text(settings.to_toml(config))
    return build_config(config_file=folder / "config.toml")


def differences(config: settings.Config, reference: settings.Config) -> dict[tuple[str, str], object]:
    left, right = (tomllib.loads(settings.to_toml(c)) for c in (config, reference))
    return {
        (section, key): value
        for section, values in left.items()
        for key, value in values.items()
        if value != right[section].get(key)
    }


@pytest.mark.parametrize(
    ("backbone", "method"), list(itertools.product(preset_names("backbones"), preset_names("methods")))
)
def test_every_backbone_loads_with_every_method_and_repeats_itself(tmp_path, backbone, method):
    config = build_config(backbone=backbone, method=method, options=pool_of(method))
    assert (config.backbone.name, config.run.method) == (backbone, method)
    assert saved_and_read(config, tmp_path) == config


OTHER_METHODS = [n for n in preset_names("methods") if load_preset("methods", n)["about"].get("group") == "replay"]


def pool_of(method: str) -> dict[str, dict[str, object]]:
    """The run that some methods replay from."""
    needs = load_preset("methods", method)["about"].get("needs_run", False)
    return {"replay": {"warm_start": "runs/pool"}} if needs else {}


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_replay_methods_say_where_they_are_from_and_leave_the_base_alone(method):
    """Clip bounds, aggregation, scale of advantages, optimizer, K, B: the study's, unless --as-published."""
    about = load_preset("methods", method)["about"]
    assert about["source"] and about["differs"] and about["title"]
    changed = differences(build_config(method=method, options=pool_of(method)), build_config(method="exgrpo"))
    replay_only = {"replay_surrogate", "replay_weight", "replay_denominator", "importance", "clip_in_mixed_phase"}
    assert {name for section, name in changed if section == "objective"} <= replay_only
    assert {section for section, _ in changed} <= {"replay", "objective", "run"}
    published = load_preset("methods", method).get("published", {})
    if not published:
        with pytest.raises(InputError, match=rf"method {method} has no \[published\] table"):
            build_config(method=method, options=pool_of(method), as_published=True)
        return
    applied = tomllib.loads(settings.to_toml(build_config(method=method, options=pool_of(method), as_published=True)))
    assert all(applied[section].items() >= values.items() for section, values in published.items())


def test_a_method_of_ones_own_is_a_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[replay]\nratio = 0.25\n[published.objective]\nclip_high = 0.28\n")
    config = build_config(method=str(file), as_published=True)
    assert (config.run.method, config.replay.ratio, config.objective.clip_high) == ("mine", 0.25, 0.28)
    assert saved_and_read(config, tmp_path) == config
    file.write_text('[replay]\nmetric = "python:mine:f"\n')
    with pytest.raises(
        InputError, match=r"mine.toml: replay.metric = 'python:mine:f' would run code of .*add --allow-code"
    ):
        build_config(method=str(file))
    assert build_config(method=str(file), files=settings.Author.USER).replay.metric == "python:mine:f"
    file.write_text('[published.replay]\nmetric = "python:mine:f"\n')
    with pytest.raises(InputError, match=r"base of mine: replay.metric = 'python:mine:f' would run code"):
        build_config(method=str(file), as_published=True)


@pytest.mark.parametrize("method", [name for name in preset_names("methods") if name not in OTHER_METHODS])
def test_a_method_changes_what_its_arm_names_and_nothing_else(method):
    changed = differences(build_config(method=method), build_config(method="exgrpo"))
    changed.pop(("run", "method"), None)
    reference = tomllib.loads(settings.to_toml(build_config(method="exgrpo")))
    own = ARMS[method].items()
    assert changed == {(section, key): value for (section, key), value in own if reference[section][key] != value}


@pytest.mark.parametrize("backbone", PUBLISHED)
def test_published_backbones_carry_the_published_settings(backbone):
    config = build_config(backbone=backbone)
    assert (config.rollout.questions_per_step, config.rollout.group_size, config.optim.minibatches) == (128, 8, 2)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 8192)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.require_eos) == (1.0, 1.0, False)
    assert (config.optim.learning_rate, config.optim.schedule) == (1e-6, "constant")
    assert (config.optim.beta1, config.optim.beta2, config.optim.weight_decay) == (0.9, 0.999, 0.01)
    assert (config.optim.grad_clip, config.optim.skip_norm) == (1.0, 500.0)
    assert (config.objective.loss_scale, config.objective.entropy_coefficient) == (64.0, 0.001)
    assert (config.replay.ratio, config.replay.mu, config.replay.sigma) == (0.5, 0.5, 0.125)
    assert (config.rollout.engine, config.optim.engine, config.backbone.dtype) == ("vllm", "auto", "bfloat16")
    assert config.data.train == "Elliott/Openr1-Math-46k-8192"
    assert (config.validation.every, config.validation.temperature, config.run.save_every) == (10, 0.6, 50)
    assert config.run.steps == (700 if backbone == "qwen-math-7b" else 500)
    assert config.replay.start_threshold == (0.0 if backbone.startswith("llama") else 0.35)
    assert config.data.template == ("step-by-step" if backbone == "llama-8b" else "thought-solution")
    raised = (40000.0, 16384) if "math" in backbone or backbone == "luffy-7b" else (0.0, 0)
    assert (config.backbone.rope_theta, config.backbone.max_position_embeddings) == raised


def test_backbones_say_what_is_known_about_them_and_small_ones_that_a_cpu_will_do():
    assert preset_names("backbones") == tuple(sorted(BACKBONES))
    for about in (load_preset("backbones", name)["about"] for name in PUBLISHED):
        assert {"title", "licence", "gated", "published", "shape"} <= set(about)
        for arm in ("on_policy", "exgrpo"):
            assert set(about["published"][arm]) == {"in_distribution", "out_of_distribution"}
    assert all(load_preset("backbones", name)["about"]["on_cpu"] for name in SMALL)
    assert not any("on_cpu" in load_preset("backbones", name)["about"] for name in PUBLISHED)


def test_precedence_from_defaults_to_assignments(tmp_path):
    # lr: settings 1e-6 < tiny preset 3e-4; ratio: settings 0.5 < method 0.25 < file 0.3 < option 0.4 < --set 0.45.
    file = tmp_path / "mine.toml"
    file.write_text("[replay]\nratio = 0.3\n")
    assert build_config().optim.learning_rate == 3e-4 and build_config().replay.ratio == 0.5
    assert build_config(method="rho-0.25").replay.ratio == 0.25
    assert build_config(method="rho-0.25", config_file=file).replay.ratio == 0.3
    options = {"replay": {"ratio": 0.4}}
    assert build_config(method="rho-0.25", config_file=file, options=options).replay.ratio == 0.4
    assert build_config(config_file=file, options=options, assignments=["replay.ratio=0.45"]).replay.ratio == 0.45


def test_a_model_of_ones_own_is_named_after_its_last_path_part(workdir):
    folder = workdir / "my-model"
    folder.mkdir()
    config = build_config(backbone="my-model")
    assert (config.backbone.name, config.backbone.source) == ("my-model", str(folder))
    assert saved_and_read(config, workdir) == config
    hub = build_config(backbone="Qwen/Qwen2.5-0.5B").backbone
    assert (hub.name, hub.source) == ("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ({"method": "grpo"}, '[run]\nmethod = "exgrpo"', "--method grpo contradicts 'exgrpo' in"),
        ({"regime": "sparse"}, '[run]\nregime = "strong"', "--regime sparse contradicts 'strong' in"),
        ({"backbone": "tiny"}, '[backbone]\nname = "luffy-7b"', "--backbone tiny contradicts 'luffy-7b' in"),
        ({}, '[backbone]\nname = "tyni"', "'tyni' is no preset and backbone.source is missing. Did you mean 'tiny'?"),
        ({}, "[run]\nmethod = 3", "run.method = 3 must be text, not int."),
        ({}, "[replay\n", "is not TOML"),
        ({}, "[replay]\nrato = 1", "unknown key replay.rato. Did you mean 'replay.ratio'?"),
    ],
)
def test_what_is_refused_is_named(tmp_path, arguments, text, message):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        build_config(config_file=file, **arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("regime", preset_names("regimes"))
def test_every_regime_loads_and_repeats_itself(tmp_path, regime):
    assert load_preset("regimes", regime)["about"]["title"]
    for method in ("grpo", "exgrpo"):
        config = build_config(regime=regime, method=method)
        assert (config.run.regime, config.run.method) == (regime, method)
        assert saved_and_read(config, tmp_path) == config


def test_a_regime_is_weaker_than_the_method_and_whatever_is_said_besides(tmp_path):
    # start_threshold: settings 0.35 < regime 0 < file 0.1 < --set 0.2; a method's own value would win too.
    assert build_config().replay.start_threshold == 0.35
    assert build_config(regime="sparse", method="exgrpo").replay.start_threshold == 0.0
    assert differences(build_config(regime="strong"), build_config()) == {("run", "regime"): "strong"}
    file = tmp_path / "mine.toml"
    file.write_text('[run]\nregime = "sparse"\n[replay]\nstart_threshold = 0.1\n')
    from_file = build_config(config_file=file)
    assert (from_file.countdown.levels[0], from_file.replay.start_threshold) == (4, 0.1)
    assert build_config(config_file=file, assignments=["replay.start_threshold=0.2"]).replay.start_threshold == 0.2


@pytest.mark.parametrize("name", preset_names("backbones"))
def test_a_backbones_template_and_held_out_questions_exist(name):
    from exgrpo_cli.questions.prompts import TEMPLATES

    data = preset_settings("backbones", name)["data"]
    assert data["template"] in {"auto", *TEMPLATES}
    assert data["heldout"] in {*preset_names("benchmarks"), *names.BUILT_IN}
