"""The shipped claims: each can be planned, has the seeds of its power calculation, and shares runs with others."""

from dataclasses import replace
from pathlib import Path

import pytest

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.config.requests import StudyRequest
from exgrpo_cli.presets import preset_names
from exgrpo_cli.runs.result import config_hash
from exgrpo_cli.studies import claims, planning, schedule
from exgrpo_cli.studies.study import Study

NIGHT, HOUR = 10 * 3600.0, 3600.0


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return planning.plan_claims(claims.chosen_claims("all"), tmp_path_factory.mktemp("studies") / "claims")


@pytest.mark.parametrize("name", preset_names("claims"))
def test_a_claim_can_fail(name: str) -> None:
    """It names what it is tested by, and has seeds enough that both verdicts are within reach."""
    claim = claims.read_claim(name)
    assert claim.about.source.startswith("arXiv") and claim.seeds[0] >= claims.FIRST_SEED
    assert len(claim.seeds) == max(8, *(contrast.seeds for contrast in claim.contrasts)) <= 16
    # The same order at every start, whatever Python's hashes are: each control before what it is compared with.
    stated = [arm for each in claim.contrasts for arm in (each.control, each.arm) if arm]
    assert list(claim.arms) == sorted(claim.arms, key=stated.index)


def test_each_run_is_planned_once_and_all_end_in_a_night_the_quick_ones_in_an_hour(
    everything: Study, tmp_path: Path
) -> None:
    keys = [(config_hash(run.config), run.seed) for run in everything.runs]
    assert len(set(keys)) == len(keys) == len({run.folder for run in everything.runs})
    assert [arm.name for arm in everything.arms].count("hard-tail: exgrpo") == 1
    taken = schedule.estimate(everything, jobs=2)
    quick = schedule.estimate(planning.plan_claims(claims.chosen_claims("quick"), tmp_path / "quick"), jobs=2)
    assert taken is not None and taken <= NIGHT
    assert quick is not None and quick <= HOUR


def test_arms_of_one_name_are_told_apart_and_run_once_in_whatever_order(tmp_path: Path) -> None:
    """The on-policy arm of two of these claims is one; the third has other questions."""
    names = ["headroom-reaches-more", "latest-in-search", "headroom-in-search"]
    for order in (names, names[::-1]):
        study = planning.plan_claims(claims.chosen_claims(",".join(order)), tmp_path / "claims")
        on_policy = [run for run in study.runs if run.config.run.method == "grpo" and run.config.optim.minibatches == 2]
        keys = [(config_hash(run.config), run.seed) for run in on_policy]
        assert len({run.arm.name for run in on_policy}) == 2
        assert len(set(keys)) == len(keys) == 11 + 8


def test_arms_keep_the_names_that_a_study_has_given_them(tmp_path: Path) -> None:
    """Else another claim's arm would be taken for one whose runs are there."""

    def planned(names: str) -> Study:
        return planning.plan_claims(claims.chosen_claims(names), tmp_path / "claims")

    def on_policy(study: Study) -> dict[str, int]:
        return {run.arm.name: run.config.countdown.seed for run in study.runs if run.config.run.method == "grpo"}

    began = planned("headroom-reaches-more")
    assert on_policy(began) == {"search: grpo": 1}
    began.write_beginning()
    for names in ("headroom-in-search,headroom-reaches-more", "headroom-reaches-more,headroom-in-search"):
        both = {"search: grpo": 1, "search: grpo (headroom-in-search)": 0}
        assert on_policy(planned(names)) == both | {"search: more-updates": 0}
    # Both names taken by other arms: the claim was another one then.
    taken = [replace(arm, name="search: grpo (headroom-in-search)") for arm in began.arms if arm.method == "grpo"]
    others = [replace(arm, name="search: grpo", method="dapo") for arm in taken]
    replace(began, arms=(*(replace(arm, method="dbb") for arm in taken), *others), runs=()).write_beginning()
    with pytest.raises(InputError, match="was begun with another claim headroom-in-search: choose another --name"):
        planned("headroom-in-search")


CLAIM = Path(__file__).with_name("claim.toml").read_text()


def test_files_of_claims_that_cannot_be_told_apart_or_are_no_claims_are_one_line(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text(CLAIM.format(settings="[]", control="grpo"))
    mine = [str(tmp_path / folder / "mine.toml") for folder in ("a", "b")]
    assert len(claims.chosen_claims(f"{mine[0]},{mine[0]}")) == 1
    with pytest.raises(InputError, match="two claims 'mine': give one of the files another name"):
        claims.chosen_claims(",".join(mine))
    fine = CLAIM.format(settings="[]", control="grpo")
    for wrong, said in (
        (CLAIM.format(settings="[1]", control="grpo"), r"Expected `str`, got `int` - at `\$\.arms\[\.\.\.\]\.settings"),
        (CLAIM.format(settings='"replay.ratio=0.5"', control="grpo"), "Expected `array`, got `str`"),
        (CLAIM.format(settings="[]", control="x:y"), "contrast of 'x:y' with itself: name another control"),
        (fine.replace("spread = 0.1", "spred = 0.1"), "Object contains unknown field `spred`"),
    ):
        Path(mine[0]).write_text(wrong)
        with pytest.raises(InputError, match=f"claim mine: {said}"):
            claims.chosen_claims(mine[0])
    two_arms = CLAIM.format(settings="[]", control="x y").replace("[[c", '[arms."x y"]\nmethod = "su01"\n[[c')
    for wrong, said in (
        (fine.replace('"search"', '"serach"'), "claim mine, arm 'serach: .*: unknown regime preset 'serach'. Did you"),
        (fine.replace('"exgrpo"', '"exgrpos"'), "claim mine, arm 'search: x:y': unknown method preset 'exgrpos'. Did"),
        (fine.replace("[]", '["optim.learning_rat=1"]'), r"claim mine, arm 'search: x:y': .*unknown key optim\.learn"),
        (two_arms, "would both be in the folder search-x-y/"),
    ):
        Path(mine[0]).write_text(wrong)
        with pytest.raises(InputError, match=said):
            planning.plan_claims(claims.chosen_claims(mine[0]), tmp_path / "claims")


def test_a_claim_of_a_backbone_may_be_tested_on_another_and_with_its_weights_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "real.toml"
    plain = CLAIM.format(settings="[]", control="grpo").replace('regime = "search"', "")
    file.write_text(plain.replace("[claim]", '[claim]\nbackbone = "smollm2-135m"'))
    studies, weights = {}, ("backbone.source=/a/W.gguf", "backbone.source=/b/c/W.gguf")
    for name, asked in {
        "as stated": {},
        "other": {"backbone": "qwen-math-1.5b"},
        "here": {"assignments": weights[:1]},
        "there": {"assignments": weights[1:]},
    }.items():
        studies[name] = planning.plan_claims(claims.chosen_claims(str(file)), tmp_path / name, StudyRequest(**asked))
    runs = {name: study.runs[0].config for name, study in studies.items()}
    assert [run.backbone.name for run in runs.values()] == ["smollm2-135m", "qwen-math-1.5b", *2 * ["smollm2-135m"]]
    assert studies["other"].claims["real"]["claim"]["backbone"] == "qwen-math-1.5b"
    # The claim is one and the same; runs of other weights are others, wherever a file of them lies.
    assert len({run.run.claims for run in runs.values()}) == 1
    assert len({config_hash(run) for run in runs.values()}) == 3 and config_hash(runs["here"]) == config_hash(
        runs["there"]
    )
    # What it states of a backbone stands in place of the rest, and is fixed by itself.
    here, there = (claims.read_claim("real-model", name) for name in (None, "qwen-math-1.5b"))
    assert "run.budget_amount=47000000" in there.arms["exgrpo"].assignments and there.fixed is None
    assert (there.terms.backbone, there.contrasts) == ("qwen-math-1.5b", here.contrasts) != (here.terms.backbone, ())
    with pytest.raises(InputError, match="leave --set and other options out"):
        planning.plan_claims(claims.chosen_claims("shaping"), tmp_path / "x", StudyRequest(assignments=weights[:1]))
    with pytest.raises(InputError, match="names claims on smollm2-135m and tiny: ask for those of one at a time"):
        claims.chosen_claims(f"shaping,{file}")


def test_a_claim_says_in_a_sentence_what_it_states_and_why_it_takes_its_seeds() -> None:
    said = str(claims.read_claim("replay-in-search"))
    assert said.startswith(
        "replay-in-search states: Replay beats on-policy training where solutions are found by search"
    )
    assert "(pass_at_1: exgrpo minus grpo > 0.03). 8 seeds tell twice that effect from it in 80 of 100" in said
