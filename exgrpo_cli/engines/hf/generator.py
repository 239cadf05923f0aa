"""The reference generator: sampling with a transformers model, rows replaced as they end.

Prompts are prefilled ahead, each once for all its rollouts. Rows that end leave the batch at once, and waiting ones
take their place at once.

Axes: rows = rollouts being decoded, vocab = vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exgrpo_cli.algo.cpu import use_fast_matmuls
from exgrpo_cli.base.errors import RunError
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams
from exgrpo_cli.engines.causal_lm import split_causal_lm, to_device, use_attention
from exgrpo_cli.engines.hf.cache import GROUPED_DECODING
from exgrpo_cli.engines.hf.decode import DecodeBatch
from exgrpo_cli.engines.protocols import Score
from exgrpo_cli.engines.sampling import Place, in_order

EOS_CHECK_EVERY = 8
"""Tokens, on a GPU, where each check for rows that ended makes the host wait for what it has queued."""


class HFGenerator:
    """Implements `protocols.Generator` with any causal language model of transformers with full attention.

    May share its module with the policy, which makes `sync` free: the weights are the same memory.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int = 256, eos_ids: Sequence[int]) -> None:
        self.weight_version = 0
        use_fast_matmuls(model)
        self._parts = split_causal_lm(model)
        self._max_rows = max_rows
        self._eos_ids = np.array(eos_ids, dtype=np.int64)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """See `protocols.Generator.generate`; rollouts come in the order in which they end."""
        self._parts.model.eval()
        finished: dict[Place, Rollout] = {}
        batch = DecodeBatch(
            self._parts,
            requests,
            params,
            max_rows=min(self._max_rows, max(1, sum(len(request.seeds) for request in requests))),
            eos_ids=to_device(self._eos_ids, self._parts.device),
            weight_version=self.weight_version,
            look_every=1 if self._parts.device.type == "cpu" else EOS_CHECK_EVERY,
        )
        # Set once, not once a step: transformers checks its config at every change.
        with use_attention(self._parts.body, GROUPED_DECODING):
            while batch.waiting or batch.num_rows:
                ended = batch.admit() if batch.waiting and batch.num_rows < batch.max_rows else batch.step()
                finished |= ended
                if on_finished is not None:
                    for (request, _), rollout in ended:
                        on_finished(request, rollout)
        return in_order(requests, finished)

    def sleep(self) -> None:
        """Nothing to give back: the module is the policy's, buffers live for one call of `generate`."""

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """See `protocols.Generator.sync`; raises RunError where names or shapes differ from the model's."""
        take_weights(self._parts.model, weights)
        self.weight_version = weight_version

    def close(self) -> None:
        """Nothing to release: buffers live for one call of `generate`."""


@torch.no_grad()
def take_weights(module: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Copy every named tensor into `module`; those that already are its own memory are left alone.

    Raises RunError when a name is unknown or missing, or a shape differs.
    """
    own = module.state_dict()
    missing = dict.fromkeys(own)
    for name, sent in weights:
        if name not in own:
            raise RunError(
                f"weight {name!r} was sent but the generator's model has none of that name; use one backbone."
            )
        target = own[name]
        if target.shape != sent.shape:
            raise RunError(
                f"weight {name!r} is {list(sent.shape)} in the policy and {list(target.shape)} in the generator; "
                f"use one backbone."
            )
        missing.pop(name, None)
        if target.data_ptr() != sent.data_ptr():
            target.copy_(sent)
    if missing:
        raise RunError(
            f"{len(missing)} weights were not sent to the generator, {next(iter(missing))!r} first; "
            f"send the whole state dict, tied weights under each of their names."
        )
