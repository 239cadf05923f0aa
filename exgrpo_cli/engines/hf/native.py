"""Decoding steps in one native call: the rollouts of the reference, two to three times as fast on a CPU.

`decode.cpp` is compiled by the machine's own C++ compiler when it is first wanted, for its processor, in some seconds;
the library is kept in the cache folder. A wheel that carried it would have to leave out what processors differ in,
which is the gain. Where there is no compiler, or the model is of another shape, the reference decodes.

Keys and values are kept in pages of 32 tokens, which rows take as they grow and give back as they end; the pages of a
prompt are those of all its rows.

Axes: panels = groups of 32 outputs, ins, outs = a weight's columns and rows, rows = rollouts being decoded.
"""

import ctypes
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from exgrpo_cli.algo.cpu import FastLinear, RoundedLinear, has_rounded_matmuls
from exgrpo_cli.base import errors, types, versions
from exgrpo_cli.base.cache import cached_folder
from exgrpo_cli.engines.causal_lm import CausalLM, own_attention
from exgrpo_cli.engines.hf.prompts import DIVERGED, Drawn, Prefilled, prefill, sample_tokens

PANEL = 32
"""Outputs of a weight's panel, and tokens of a page."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles are those of the position alone."""
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
THREADED = ("-fopenmp",)
COMPILE_SECONDS = 120
PAGES_AT_ONCE = 64
ROUNDINGS = 512
"""Roundings by which logits may differ from those of transformers: many layers, two orders of summation."""
_FORMAT = 1
SWITCH = "EXGRPO_NATIVE"
"""Environment variable that is 0 where the reference is to decode."""


class _Layer(ctypes.Structure):
    names = ("attention_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "output", "ffn_norm", "gate_up", "down")
    _fields_ = [(name, ctypes.c_void_p) for name in names]


class _Model(ctypes.Structure):
    sizes = ("layers", "hidden", "heads", "kv_heads", "width", "ffn", "vocab", "threads")
    _fields_ = [
        *((name, ctypes.c_int64) for name in sizes),
        *((name, ctypes.c_float) for name in ("epsilon", "scaling")),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "cosines", "sines")),
    ]


@cache
def native_library() -> ctypes.CDLL | str:
    """The compiled decoding step, or the reason why there is none, in a few words."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    source, compiler = Path(__file__).with_name("decode.cpp"), os.environ.get("CXX") or "c++"
    made_of = [_FORMAT, source.read_text(encoding="utf-8"), versions.processor(), compiler, *FLAGS]
    try:
        folder = cached_folder(
            name="decode", key={"made_of": made_of}, build=lambda to: _compile(compiler, source, to / "decode.so")
        )
        return ctypes.CDLL(str(folder / "decode.so"))
    except (errors.ExgrpoError, OSError) as error:
        return errors.first_line(error).rstrip(".")


def _compile(compiler: str, source: Path, library: Path) -> None:
    # Without OpenMP, which clang may lack, steps run on one thread.
    for flags in ((*FLAGS, *THREADED), FLAGS):
        command = [compiler, *flags, str(source), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        except OSError as error:
            raise errors.InputError(f"no C++ compiler answers as {compiler!r}") from error
        except subprocess.TimeoutExpired as error:
            raise errors.InputError(f"{compiler!r} is not done after {COMPILE_SECONDS} s") from error
        if not done.returncode:
            return
    raise errors.InputError(f"{compiler!r} fails: {(done.stderr.strip() or 'no message').splitlines()[0]}")


def usable_library(parts: CausalLM) -> ctypes.CDLL | str | None:
    """The library, proved on this model; the reason why there is none; or None, where the model is of another shape."""
    if not runs_natively(parts):
        return None
    library = native_library()
    return library if isinstance(library, str) else _prove(parts, library) or library


@torch.no_grad()
def _prove(parts: CausalLM, library: ctypes.CDLL) -> str:
    """Difference from transformers' logits after two short prompts, in words, or ""."""
    ids = (np.arange(9, dtype=np.int32) * 7) % parts.head.weight.shape[0]
    requests = [types.RolloutRequest(question_id="", prompt_ids=each, seeds=(0,)) for each in (ids[:3], ids[:5])]
    params = types.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1)
    decoder = NativeDecoder(NativeModel(parts, library, len(ids)), params, len(requests), 1)
    decoder.fill(prefill(parts, requests, 0, own_attention(parts.body)), [0, 1], 0)
    ours = decoder.logits(torch.tensor([ids[7], ids[8]], dtype=torch.long))
    rounded = has_rounded_matmuls(parts.body)
    tolerance = 8 * torch.finfo(torch.bfloat16).eps if rounded else ROUNDINGS * torch.finfo(torch.float32).eps
    for request, newest, logits in zip(requests, ids[7:], ours, strict=True):
        whole = torch.from_numpy(np.append(request.prompt_ids, newest).astype(np.int64))[None]
        expected = parts.head(parts.body(input_ids=whole, use_cache=False).last_hidden_state[0, -1])
        gap = float((logits - expected).abs().max())
        if not gap <= tolerance * max(1.0, float(expected.abs().max())):
            return f"its logits differ from transformers' by {gap:.3g}"
    return ""


def _plain(module: nn.Module, *, bias: bool = False) -> bool:
    return type(module) in (nn.Linear, FastLinear, RoundedLinear) and (bias or module.bias is None)


def runs_natively(parts: CausalLM) -> bool:
    """Whether `decode.cpp` computes this model: float32 on a CPU, of a family and with parts that it knows."""
    config, body = parts.model.config, cast(Any, parts.body)
    return (
        parts.device.type == "cpu"
        and parts.head.weight.dtype == torch.float32
        and config.model_type in FAMILIES
        and type(body).__module__.startswith("transformers.")
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type") in ROPE
        and config.rope_parameters.get("partial_rotary_factor", 1) == 1
        and all(
            all(_plain(getattr(layer.self_attn, f"{name}_proj"), bias=True) for name in "qkv")
            and _plain(layer.self_attn.o_proj)
            and all(_plain(getattr(layer.mlp, f"{name}_proj")) for name in ("gate", "up", "down"))
            for layer in body.layers
        )
    )


class NativeModel:
    """Weights of a model as `decode.cpp` reads them: a copy, for the time of one call of `generate`."""

    def __init__(self, parts: CausalLM, library: ctypes.CDLL, max_columns: int) -> None:
        config, model, body = parts.model.config, cast(Any, parts.model), cast(Any, parts.body)
        self.library = library
        self._kept: list[Tensor] = []
        layers = (_Layer * config.num_hidden_layers)()
        for layer, target in zip(body.layers, layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = [getattr(attention, f"{name}_proj") for name in "qkv"]
            found = {
                "attention_norm": layer.input_layernorm.weight,
                "qkv": packed(library, [_factor(each) for each in qkv]),
                "query_norm": attention.q_norm.weight if hasattr(attention, "q_norm") else None,
                "key_norm": attention.k_norm.weight if hasattr(attention, "k_norm") else None,
                "output": packed(library, [_factor(attention.o_proj)]),
                "ffn_norm": layer.post_attention_layernorm.weight,
                "gate_up": packed(library, [_factor(mlp.gate_proj), _factor(mlp.up_proj)], beside=True),
                "down": packed(library, [_factor(mlp.down_proj)]),
            }
            if qkv[0].bias is not None:
                bias = torch.cat([each.bias for each in qkv])
                found["qkv_bias"] = F.pad(bias, (0, -len(bias) % PANEL))
            for name, tensor in found.items():
                setattr(target, name, None if tensor is None else self._address(tensor))
        positions = torch.arange(max_columns)[None]
        angles = body.rotary_emb(parts.head.weight, positions)
        width = body.layers[0].self_attn.head_dim
        cosines, sines = (each[0, :, : width // 2].contiguous() for each in angles)
        self.struct = _Model(
            layers=config.num_hidden_layers, hidden=config.hidden_size, heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads, width=width, ffn=config.intermediate_size,
            vocab=parts.head.weight.shape[0], threads=torch.get_num_threads(), epsilon=config.rms_norm_eps,
            scaling=body.layers[0].self_attn.scaling, layer=layers,
            embedding=self._address(model.get_input_embeddings().weight),
            norm=self._address(body.norm.weight), head=self._address(packed(library, [parts.head.weight])),
            cosines=self._address(cosines), sines=self._address(sines),
        )  # fmt: skip

    def _address(self, tensor: Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _factor(linear: nn.Linear) -> Tensor:
    """Weights as the trainer multiplies them: rounded where its matmuls round them."""
    return linear.weight.bfloat16().float() if isinstance(linear, RoundedLinear) else linear.weight


def packed(library: ctypes.CDLL, weights: Sequence[Tensor], *, beside: bool = False) -> Float[Tensor, "panels ins 32"]:
    """Panels of the weights one below the other, or of two of one size side by side in each panel."""
    lanes, ins = (PANEL // 2 if beside else PANEL), weights[0].shape[1]
    outs = len(weights[0]) if beside else sum(map(len, weights))
    # numpy asks for huge pages: they are there sooner, and read faster.
    panels, first = torch.from_numpy(np.zeros((-(-outs // lanes), ins, PANEL), dtype=np.float32)), 0
    for number, each in enumerate(each.detach().contiguous() for each in weights):
        sizes = len(each), ins, *((0, lanes, number * lanes) if beside else (first, lanes, 0))
        library.pack(ctypes.c_void_p(each.data_ptr()), *map(ctypes.c_int64, sizes), ctypes.c_void_p(panels.data_ptr()))
        first += len(each)
    return panels


class NativeDecoder:
    """See `SlotDecoder`: rows decoded by `decode.cpp`."""

    def __init__(self, model: NativeModel, params: types.SamplingParams, max_rows: int, max_tokens: int) -> None:
        self._model, self._params = model, params
        sizes = model.struct
        self._block = sizes.width * PANEL, -(-sizes.width // PANEL) * PANEL * PANEL
        """Floats of the keys and of the values of a page, for one layer and key-value head."""
        self._pages = np.zeros((max_rows, -(-max_tokens // PANEL)), dtype=np.int64)
        """Addresses of each row's own pages, in order."""
        self._free: list[int] = []
        self._chunks: list[Tensor] = []
        self._rows = np.zeros((max_rows, 6), dtype=np.int64)
        """Each row as `Row` of decode.cpp: where its pages lie, and what they hold."""
        self._rows[:, 4] = self._pages.ctypes.data + np.arange(max_rows) * self._pages.strides[0]
        self._prompts: dict[int, tuple[list[Tensor], np.ndarray]] = {}
        """Pages of the passes over prompts whose rows are here, and the columns of `_rows` that name them, by pass."""
        self._passes = np.zeros(max_rows, dtype=np.int64)
        """First request of the pass of each row's prompt."""

    def fill(self, prefilled: Prefilled, sources: Sequence[int], first_row: int) -> None:
        """See `SlotDecoder.fill`."""
        if prefilled.first not in self._prompts:
            self._prompts[prefilled.first] = self._lay_out(prefilled)
        rows = slice(first_row, first_row + len(sources))
        self._rows[rows, :4] = self._prompts[prefilled.first][1][sources]
        self._rows[rows, 5] = 0
        self._passes[rows] = prefilled.first

    def reorder(self, order: Int[np.ndarray, " rows"], num_rows: int) -> None:
        """See `SlotDecoder.reorder`."""
        ended = order[num_rows:]
        held = np.arange(self._pages.shape[1]) < -(-self._rows[ended, 5:] // PANEL)
        self._free.extend(self._pages[ended][held].tolist())
        kept = order[:num_rows]
        for state in (self._pages, self._passes):
            state[:num_rows] = state[kept]
        own = self._rows[:, 4].copy()
        self._rows[:num_rows] = self._rows[kept]
        self._rows[:, 4] = own
        present = set(self._passes[:num_rows].tolist())
        # The newest may have rows that are still to come.
        for first in [each for each in list(self._prompts)[:-1] if each not in present]:
            del self._prompts[first]

    def step(self, newest: Int[Tensor, " rows"], uniforms: Float[Tensor, " rows"]) -> Drawn:
        """See `SlotDecoder.step`. Raises RunError where logits are NaN."""
        if self._params.top_p < 1:
            return sample_tokens(self.logits(newest), uniforms, self._params)
        tokens, numbers = torch.empty_like(newest), torch.empty(1 + self._params.entropies, len(newest))
        self._call(newest, uniforms, tokens, *numbers, *[None] * (2 - len(numbers)), None)
        if int(tokens.min()) < 0:
            raise errors.RunError(DIVERGED)
        return tokens, numbers

    def logits(self, newest: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Read the newest token of each row; returns what the next ones are drawn from."""
        logits = torch.empty(len(newest), self._model.struct.vocab)
        self._call(newest, None, None, None, None, logits)
        return logits

    def _call(self, newest: Tensor, uniforms: Tensor | None, *results: Tensor | None) -> None:
        """One step; results are tokens, log-probs, entropies and logits, each of them or None."""
        count, library, model = len(newest), self._model.library, ctypes.byref(self._model.struct)
        for row in np.flatnonzero(self._rows[:count, 5] % PANEL == 0).tolist():
            self._pages[row, self._rows[row, 5] // PANEL] = self._page()
        tensors = newest, uniforms, *results
        assert all(each is None or each.is_contiguous() for each in tensors)
        read, drawn, *others = (None if each is None else ctypes.c_void_p(each.data_ptr()) for each in tensors)
        rows, temperature = ctypes.c_void_p(self._rows.ctypes.data), ctypes.c_float(self._params.temperature)
        library.decode_step(model, ctypes.c_int64(count), rows, read, drawn, temperature, *others)

    def _page(self) -> int:
        if not self._free:
            floats = self._model.struct.layers * self._model.struct.kv_heads * sum(self._block)
            chunk = torch.empty(PAGES_AT_ONCE, floats)
            self._chunks.append(chunk)
            self._free = [page.data_ptr() for page in chunk]
        return self._free.pop()

    def _lay_out(self, prefilled: Prefilled) -> tuple[list[Tensor], np.ndarray]:
        """Pages of a pass over prompts, and for each prompt the columns of `_rows` that name them."""
        # A beginning shorter than a page costs more as a segment of its own than it saves.
        prefix = prefilled.prefix if prefilled.prefix >= PANEL else 0
        states = [(layer.keys, layer.values) for layer in cast(Any, prefilled.cache).layers]
        shared = self._paged([(keys[:1, :, :prefix], values[:1, :, :prefix]) for keys, values in states])
        rest = self._paged([(keys[:, :, prefix:], values[:, :, prefix:]) for keys, values in states])
        lengths = np.array(prefilled.lengths)
        alone = rest.data_ptr() + np.arange(len(rest)) * rest.stride(0) * rest.element_size()
        same = np.full_like(lengths, shared.data_ptr())
        return [shared, rest], np.column_stack([same, alone, np.full_like(lengths, prefix), lengths - prefix])

    def _paged(self, states: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Pages [prompts][pages][layers][key-value heads][block] of the keys and values of each layer."""
        (keys, _), width = states[0], self._model.struct.width
        prompts, heads, columns, _ = keys.shape
        pages, wide = max(1, -(-columns // PANEL)), -(-width // PANEL) * PANEL
        paged = torch.empty(prompts, pages, len(states), heads, sum(self._block))
        fill = pages * PANEL - columns
        for layer, (keys, values) in enumerate(states):
            whole = F.pad(keys, (0, 0, 0, fill)).view(prompts, heads, pages, PANEL, width)
            target = paged[:, :, layer, :, : self._block[0]].view(prompts, pages, heads, width, PANEL)
            target.copy_(whole.permute(0, 2, 1, 4, 3))
            whole = F.pad(values, (0, wide - width, 0, fill)).view(prompts, heads, pages, PANEL, wide // PANEL, PANEL)
            target = paged[:, :, layer, :, self._block[0] :].view(prompts, pages, heads, wide // PANEL, PANEL, PANEL)
            target.copy_(whole.permute(0, 2, 1, 4, 3, 5))
        return paged
