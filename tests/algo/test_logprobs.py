"""Log-probs and entropies without full logits, against the full logits in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from exgrpo_cli.algo.logprobs import token_logprobs

TOKENS, HIDDEN, VOCAB = 37, 16, 301


def reference(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return logprobs[torch.arange(len(ids)), ids], -(logprobs.exp() * logprobs).sum(-1)


def example(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    ids[:2] = torch.tensor([0, VOCAB - 1])
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids


# One tile; 301 = 43 tiles of 7 columns; 37 of 8 and a last of 5; of one column; token blocks of 3 and of 1.
@pytest.mark.parametrize("tile_elements", [10**6, TOKENS * 7, TOKENS * 8, TOKENS, 3 * 128, 30])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_full_logits(tile_elements: int, temperature: float) -> None:
    hidden, weight, ids = example()
    up_logprobs, up_entropies = torch.randn(2, TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for compute in (
        lambda: token_logprobs(hidden, weight, ids, temperature=temperature, tile_elements=tile_elements),
        lambda: reference(hidden, weight, ids, temperature),
    ):
        logprobs, entropies = compute()
        grads = torch.autograd.grad((logprobs * up_logprobs + entropies * up_entropies).sum(), (hidden, weight))
        results.append((logprobs, entropies, *grads))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_gradients_pass_gradcheck() -> None:
    hidden, weight, ids = example()
    small = hidden[:3].detach().requires_grad_(), weight[:11].detach().requires_grad_(), ids[:3] % 11
    torch.autograd.gradcheck(lambda h, w: token_logprobs(h, w, small[2], temperature=0.7, tile_elements=12), small[:2])


def test_extreme_logits_stay_finite_and_exact() -> None:
    # Logits of several thousand, where exp overflows and all but one probability underflows.
    hidden, weight, ids = example(torch.float32, scale=1000.0)
    ours = token_logprobs(hidden, weight, ids, temperature=1.0, tile_elements=TOKENS * 50)
    wide = reference(hidden.double(), weight.double(), ids, 1.0)
    torch.testing.assert_close(ours[0].double(), wide[0], rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(ours[1].double(), wide[1], rtol=1e-3, atol=1e-3)
    for grad in torch.autograd.grad((ours[0] + ours[1]).sum(), (hidden, weight)):
        assert grad.isfinite().all()


def test_bfloat16_hidden_states_give_float32_results_and_bfloat16_gradients() -> None:
    hidden, weight, ids = example(torch.bfloat16)
    logprobs, entropies = token_logprobs(hidden, weight, ids, temperature=1.0, tile_elements=TOKENS * 50)
    assert logprobs.dtype == entropies.dtype == torch.float32
    wide = reference(hidden.detach().double(), weight.detach().double(), ids, 1.0)
    # Logits of up to 16 rounded to 8 bits: errors up to 1/32, of the token's own and of those it is normalised by.
    torch.testing.assert_close(logprobs.double(), wide[0], rtol=0, atol=1 / 16 + 0.01)
    grads = torch.autograd.grad((logprobs + entropies).sum(), (hidden, weight))
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation, forward or backward, puts out."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, Tensor):
                self.elements = max(self.elements, output.numel())
        return result


@pytest.mark.parametrize("frozen", [False, True])
def test_full_logits_never_exist_and_a_frozen_head_gets_no_gradient(frozen: bool) -> None:
    hidden, weight, ids = example()
    with LargestTensor() as largest:
        head = weight.detach() if frozen else weight
        logprobs, entropies = token_logprobs(hidden, head, ids, temperature=1.0, tile_elements=1000)
        (logprobs.sum() + entropies.sum()).backward()
    # Tiles of 1000 // 37 = 27 columns have 999 entries; the head and its gradient, 301 x 16, are the largest tensors.
    assert largest.elements == VOCAB * HIDDEN < TOKENS * VOCAB
    assert hidden.grad is not None and (weight.grad is None) == frozen
