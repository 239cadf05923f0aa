"""From token sequences to the hidden states that predict their response tokens.

Rows are padded on the right and start at position 0: under causal attention no real token ever sees a pad token, so no
attention mask is needed and the fastest attention kernel applies. The last response token is never an input.

Axes: tokens = response tokens of all rows, one row after the other; hidden = model width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from exgrpo_cli.engines.causal_lm import CausalLM, hidden_states
from exgrpo_cli.types import TokenSequence

PAD_ID = 0
"""Any valid id: pad positions are computed, never read."""


def input_length(sequence: TokenSequence) -> int:
    """Tokens a row feeds to the model."""
    return len(sequence.prompt_ids) + len(sequence.response_ids) - 1


def response_ids(sequences: Sequence[TokenSequence], device: torch.device) -> Int[Tensor, "tokens"]:
    """The response tokens of all rows."""
    return torch.from_numpy(np.concatenate([row.response_ids for row in sequences]).astype(np.int64)).to(device)


def response_hidden(parts: CausalLM, sequences: Sequence[TokenSequence]) -> Float[Tensor, "tokens hidden"]:
    """Hidden states of the positions before each response token."""
    inputs = np.full((len(sequences), max(map(input_length, sequences))), PAD_ID, dtype=np.int64)
    positions = []
    for index, row in enumerate(sequences):
        length, prompt = input_length(row), len(row.prompt_ids)
        inputs[index, :prompt] = row.prompt_ids
        inputs[index, prompt:length] = row.response_ids[:-1]
        positions.append(index * inputs.shape[1] + np.arange(prompt - 1, length))
    hidden = hidden_states(parts, input_ids=torch.from_numpy(inputs).to(parts.device))
    return hidden.flatten(0, 1).index_select(0, torch.from_numpy(np.concatenate(positions)).to(parts.device))
