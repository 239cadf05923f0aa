"""The shipped claims: each can be planned, has the seeds of its power calculation, and shares runs with others."""

from pathlib import Path

import pytest

from exgrpo_cli.ablation.claims.claim import FIRST_SEED, chosen_claims, read_claim
from exgrpo_cli.ablation.claims.plan import plan_claims
from exgrpo_cli.ablation.duration import estimate
from exgrpo_cli.ablation.study import Study
from exgrpo_cli.presets import preset_names
from exgrpo_cli.runs.result import config_hash

NIGHT, HOUR = 10 * 3600.0, 3600.0


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return plan_claims(chosen_claims("all"), name="claims", root=tmp_path_factory.mktemp("studies"))


@pytest.mark.parametrize("name", preset_names("claims"))
def test_a_claim_can_fail(name: str) -> None:
    """It names what it is tested by, and has seeds enough that both verdicts are within reach."""
    claim = read_claim(name)
    assert claim.source.startswith("arXiv") and claim.seeds[0] >= FIRST_SEED
    assert len(claim.seeds) == max(8, *(contrast.seeds for contrast in claim.contrasts)) <= 16
    # The same order at every start, whatever Python's hashes are: each control before what it is compared with.
    stated = [arm for each in claim.contrasts for arm in (each.control, each.arm) if arm]
    assert list(claim.arms) == sorted(claim.arms, key=stated.index)


def test_each_run_is_planned_once_and_all_end_in_a_night_the_quick_ones_in_an_hour(
    everything: Study, tmp_path: Path
) -> None:
    keys = [(config_hash(run.config), run.seed) for run in everything.runs]
    assert len(set(keys)) == len(keys)
    assert len({run.folder for run in everything.runs}) == len(keys)
    taken = estimate(everything, jobs=2)
    quick = estimate(plan_claims(chosen_claims("quick"), name="quick", root=tmp_path), jobs=2)
    assert taken is not None and taken <= NIGHT
    assert quick is not None and quick <= HOUR


def test_arms_of_one_name_are_told_apart_and_run_once_in_whatever_order(tmp_path: Path) -> None:
    """The on-policy arm of two of these claims is one; the third has other questions."""
    names = ["headroom-reaches-more", "latest-in-search", "headroom-in-search"]
    for order in (names, names[::-1]):
        study = plan_claims(chosen_claims(",".join(order)), name="claims", root=tmp_path)
        on_policy = [run for run in study.runs if run.config.run.method == "grpo" and run.config.optim.minibatches == 2]
        keys = [(config_hash(run.config), run.seed) for run in on_policy]
        assert len({run.arm.name for run in on_policy}) == 2
        assert len(set(keys)) == len(keys) == 11 + 8


def test_claims_of_one_regime_share_their_arms(tmp_path: Path) -> None:
    both = chosen_claims("shaping,importance-correction")
    study = plan_claims(both, name="claims", root=tmp_path)
    assert [arm.name for arm in study.arms].count("hard-tail: exgrpo") == 1
    assert len(study.runs) == sum(len({*each.arms}) * len(each.seeds) for each in both) - len(both[0].seeds)
