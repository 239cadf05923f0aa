"""Every rank samples its share of the requests; all get all rollouts."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from exgrpo_cli.engines.protocols import Generator, Score
from exgrpo_cli.ranks.ranks import Ranks
from exgrpo_cli.types import Rollout, RolloutRequest, SamplingParams


class RankedGenerator:
    """Implements `protocols.Generator` with one generator on each rank, or on each `tensor_parallel` neighbours.

    A rollout depends on weights, prompt and seed alone, so it is the same on whichever rank it is sampled. Ranks that
    hold one generator together sample the same share.
    """

    def __init__(self, local: Generator, ranks: Ranks, *, tensor_parallel: int = 1) -> None:
        self.local = local
        """This rank's own, or its part of one."""
        self._ranks = ranks
        self._tensor_parallel = tensor_parallel

    @property
    def weight_version(self) -> int:
        """Version of the weights that this rank's engine samples from."""
        return self.local.weight_version

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """As the protocol says; `on_finished` is called once all ranks are done, in the order of requests."""
        together = self._tensor_parallel
        own = self.local.generate(self._ranks.share(requests, together=together), params)
        groups = self._ranks.whole(own, together=together)
        if on_finished is not None:
            for index, group in enumerate(groups):
                for rollout in group:
                    on_finished(index, rollout)
        return groups

    def sleep(self) -> None:
        """See `protocols.Generator.sleep`."""
        self.local.sleep()

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """See `protocols.Generator.sync`."""
        self.local.sync(weights, weight_version, score)

    def close(self) -> None:
        """See `protocols.Generator.close`."""
        self.local.close()


def local_generator(generator: Generator) -> Generator:
    """What samples on this rank alone."""
    return generator.local if isinstance(generator, RankedGenerator) else generator
