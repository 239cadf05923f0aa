"""What tests of the loop share: the mini-batches that a policy is given, no row of which is in any table."""

import pytest

from exgrpo_cli.algo.batching import MiniBatch
from exgrpo_cli.engines.policy.policy import Policy, UpdateReport


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[MiniBatch]:
    """The mini-batches that the policy is given."""
    seen: list[MiniBatch] = []
    update = Policy.update

    def note(policy: Policy, batch: MiniBatch) -> UpdateReport:
        seen.append(batch)
        return update(policy, batch)

    monkeypatch.setattr(Policy, "update", note)
    return seen
