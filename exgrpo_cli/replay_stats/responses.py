"""Texts of stored trajectories: token ids from the ledger, words from the run's own tokenizer, without torch."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from exgrpo_cli.base.errors import InputError
from exgrpo_cli.ledger.reader import LedgerReader, LedgerWarning
from exgrpo_cli.replay_stats.record import LEDGER_FOLDER

TOKENIZER_FILE = "tokenizer.json"


def response_texts(run: Path, source: str, trajectory_ids: Sequence[int]) -> dict[int, str]:
    """Decoded response of each trajectory, special tokens left out; empty where the run has no tokenizer yet.

    The tokenizer is that of the run's model, before the end that of a checkpoint, before the first one that of the
    backbone's `source` where this is a folder. Raises InputError for a damaged tokenizer file or an unknown trajectory.
    """
    path = find_tokenizer(run, source)
    if path is None or not trajectory_ids:
        return {}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(_whole_json(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LedgerWarning)  # said of the run already
        bodies = LedgerReader(run / LEDGER_FOLDER).bodies(trajectory_ids)
    texts = tokenizer.decode_batch([token_ids.tolist() for token_ids, _ in bodies], skip_special_tokens=True)
    return dict(zip(trajectory_ids, texts, strict=True))


def find_tokenizer(run: Path, source: str) -> Path | None:
    """The tokenizer file that the run's responses can be decoded with; None where there is none yet."""
    checkpoints = sorted((run / "checkpoints").glob(f"step-*/model/{TOKENIZER_FILE}"), reverse=True)
    places = [run / "model" / TOKENIZER_FILE, *checkpoints, Path(source) / TOKENIZER_FILE]
    return next((path for path in places if path.is_file()), None)


def _whole_json(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): restore it from a copy, or delete it.") from None
    return text
