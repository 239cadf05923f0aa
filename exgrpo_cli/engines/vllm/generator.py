"""Rollouts by vLLM in the process of the trainer: weights are taken over in place, memory is lent to the update.

Every rollout is a request of its own with its own seed; rollouts of one prompt share its cache blocks. Order around an
update: sleep, wake the weights, take the new ones, drop cached prefixes, wake the cache, prove.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from exgrpo_cli.base.errors import InputError, RunError, ToolkitWarning
from exgrpo_cli.base.types import Rollout, RolloutRequest, SamplingParams, StopReason, TokenSequence
from exgrpo_cli.engines.generators import Place, Score, in_order, places_of
from exgrpo_cli.engines.vllm.proof import (
    Canary,
    HeldWeight,
    SentWeights,
    held_weights,
    require_arrived,
    require_equal_logprobs,
    state_dict_names,
)
from exgrpo_cli.engines.vllm.start import VLLMSettings, open_llm

if TYPE_CHECKING:
    import vllm

DISCARD_ALL = 2
"""Sleep level: weights are not kept in main memory, because new ones follow."""


class VLLMGenerator:
    """Implements `Generator`; its log-probs are of the distribution that was sampled from, after top_p."""

    def __init__(self, settings: VLLMSettings, *, eos_ids: Sequence[int], canary: Canary | None = None) -> None:
        """Start the engine with the weights of `settings.folder`; a generator that is synced needs a `canary`.

        Raises InputError when vLLM is not installed or cannot serve the backbone.
        """
        self.llm = open_llm(settings)
        self.weight_version = 0
        self._settings = settings
        self._eos_ids = list(eos_ids)
        self._canary = canary
        self._asleep = False
        self._num_requests = 0
        self._names = state_dict_names(settings.folder)
        self._first_gap: float | None = None
        unread = sorted(self._names - self._held().keys()) if canary is not None else []
        if unread:
            warnings.warn(
                f"{len(unread)} of {len(self._names)} weights cannot be read back from vLLM, {unread[0]!r} first: that "
                "they arrive shows in log-probs alone, as far as rounding lets it.",
                ToolkitWarning,
                stacklevel=2,
            )

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        params: SamplingParams,
        on_finished: Callable[[int, Rollout], None] | None = None,
    ) -> list[list[Rollout]]:
        """See `Generator.generate`; rollouts come as vLLM ends them."""
        assert not self._asleep, "a generator that sleeps is woken by sync"
        for request in requests:
            if len(request.prompt_ids) + params.max_new_tokens > self._settings.max_tokens:
                raise InputError(
                    f"question {request.question_id} has a prompt of {len(request.prompt_ids)} tokens, and with "
                    f"{params.max_new_tokens} new ones it exceeds the {self._settings.max_tokens} that the vllm engine "
                    "was started for."
                )
        wanted = places_of(requests)
        prompts = [
            (requests[index].prompt_ids, self._rollout_params(params, requests[index].seeds[member]))
            for index, member in wanted
        ]
        finished: dict[Place, Rollout] = {}
        for position, output in self._run(prompts):
            index, member = wanted[position]
            rollout = self._rollout(requests[index], member, output)
            finished[index, member] = rollout
            if on_finished is not None:
                on_finished(index, rollout)
        return in_order(requests, finished)

    def logprobs(self, sequence: TokenSequence, temperature: float) -> Float32[np.ndarray, " tokens"]:
        """Log-probs of given response tokens at `temperature`, by the code that samples: one request per token."""
        import vllm

        prompts = [
            (
                np.concatenate([sequence.prompt_ids, sequence.response_ids[:place]]),
                vllm.SamplingParams(
                    temperature=temperature,
                    max_tokens=1,
                    seed=0,
                    ignore_eos=True,
                    detokenize=False,
                    logprob_token_ids=[int(token)],
                ),
            )
            for place, token in enumerate(sequence.response_ids)
        ]
        values = np.zeros(len(prompts), dtype=np.float32)
        for place, output in self._run(prompts):
            values[place] = output.logprobs[0][int(sequence.response_ids[place])].logprob
        return values

    def sleep(self) -> None:
        """Discard weights and cache on the GPU until the next `sync`; vLLM's CPU build keeps its memory."""
        self.llm.sleep(level=DISCARD_ALL)
        self._asleep = True

    def sync(self, weights: Iterator[tuple[str, Tensor]], weight_version: int, score: Score | None = None) -> None:
        """Stream the weights into the engine, layer by layer and in place, and prove that it computes with them."""
        if self._asleep:
            # What torch keeps of the update's activations is not free for vLLM, which allocates by itself.
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
        held = self._held()
        sent = SentWeights(weights, held)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(sent)})
        if not self.llm.reset_prefix_cache():
            raise RunError("vLLM kept cached prefixes of the old weights: requests were under way during a sync.")
        if self._asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        require_arrived(sent, self._names, held)
        if score is not None and self._canary is not None:
            expected = score([self._canary.sequence])[0].logprobs
            engine = self.logprobs(self._canary.sequence, self._canary.temperature)
            gap = require_equal_logprobs(expected, engine, self._settings.dtype, self._first_gap)
            self._first_gap = gap if self._first_gap is None else self._first_gap
        self.weight_version = weight_version

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        self.llm.llm_engine.engine_core.shutdown()

    def _run(self, prompts: Sequence[tuple[np.ndarray, "vllm.SamplingParams"]]) -> Iterator[tuple[int, Any]]:
        """Hand all prompts to the engine and yield (position, its one output) as each ends."""
        from vllm import RequestOutput
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        waiting: dict[str, int] = {}
        try:
            for position, (prompt_ids, params) in enumerate(prompts):
                params.output_kind = RequestOutputKind.FINAL_ONLY
                name = str(self._num_requests)
                self._num_requests += 1
                engine.add_request(name, tokens_input(prompt_ids.tolist()), params)
                waiting[name] = position
            while waiting:
                for result in engine.step():
                    if isinstance(result, RequestOutput) and result.finished:
                        yield waiting.pop(result.request_id), result.outputs[0]
        finally:
            # Interrupted or failed: nothing of these requests may linger in the next call.
            if waiting:
                engine.abort_request(list(waiting))

    def _rollout_params(self, params: SamplingParams, seed: int) -> "vllm.SamplingParams":
        import vllm

        return vllm.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens,
            seed=seed,
            # Ends at our ids alone; vLLM includes the one that ended it in the output.
            ignore_eos=True,
            stop_token_ids=self._eos_ids,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
        )

    def _rollout(self, request: RolloutRequest, member: int, output: Any) -> Rollout:
        if output.finish_reason not in ("stop", "length"):
            raise RunError(f"vLLM ended a rollout of question {request.question_id} with {output.finish_reason!r}.")
        return Rollout(
            question_id=request.question_id,
            member=member,
            token_ids=np.array(output.token_ids, dtype=np.int32),
            engine_logprobs=np.array(output.logprobs.logprobs, dtype=np.float32),
            stop_reason=StopReason.EOS if output.finish_reason == "stop" else StopReason.LENGTH,
            weight_version=self.weight_version,
        )

    def _held(self) -> dict[str, HeldWeight]:
        rank = 0
        if self._settings.tensor_parallel > 1:
            from vllm.distributed import get_tensor_model_parallel_rank

            rank = int(get_tensor_model_parallel_rank())
        held: dict[str, HeldWeight] = self.llm.apply_model(lambda model: held_weights(self._names, model, rank))[0]
        return held
