"""Peak memory and time of log-probs and entropies, forward and backward, beyond what any method needs.

    python benchmarks/logprob_memory.py            # 8,192 tokens x 152,000 vocabulary, width 1536
    python benchmarks/logprob_memory.py --tokens 32768 --hidden 256 --json

Counted is what exists at the worst moment on top of the hidden states, the head weight and its gradient. On a CPU that
is the growth of the process's peak resident memory, on CUDA that of the allocator's peak.
"""

import argparse
import json
import resource
import time

import torch

from exgrpo_cli.algo.logprobs import token_logprobs


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_tokens: int, vocab: int, width: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    # A first small pass loads kernels and their workspaces, which are not the method's.
    small = [torch.randn(64, width, device=device, dtype=dtype, requires_grad=True) for _ in range(2)]
    sum(token_logprobs(*small, torch.arange(64, device=device), temperature=1.0)).sum().backward()  # type: ignore[arg-type]
    hidden = torch.randn(num_tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    token_ids = torch.randint(0, vocab, (num_tokens,), device=device)
    weight.grad = torch.zeros_like(weight).fill_(0.0)
    weight_gradient_bytes = weight.grad.numel() * weight.grad.element_size()
    weight.grad = None
    before = peak_bytes(device)
    start = time.perf_counter()
    logprobs, entropies = token_logprobs(hidden, weight, token_ids, temperature=1.0)
    (logprobs.sum() + entropies.sum()).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {
        "tokens": num_tokens,
        "vocabulary": vocab,
        "width": width,
        "full_logits_gb": num_tokens * vocab * 4 / 1e9,
        "head_gradient_gb": weight_gradient_bytes / 1e9,
        # The peak before already held hidden states, head and a head gradient.
        "beyond_gb": (peak_bytes(device) - before) / 1e9,
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=1536, help="model width")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = measure(
        arguments.tokens,
        arguments.vocab,
        arguments.hidden,
        getattr(torch, arguments.dtype),
        torch.device(arguments.device),
    )
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:20} {value:12,.3f}")


if __name__ == "__main__":
    main()
