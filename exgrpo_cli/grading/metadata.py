"""What a question carries beside its gold answer: a JSON table that its verifier or the check of its traces reads.

`{"verifier": "countdown", "numbers": [2, 3], "target": 6}` names the verifier of the question. The default grader
`math` grades such a question by it; a grader that was chosen instead is used as chosen.
"""

import json
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def read_metadata(metadata: str | None) -> dict[str, Any]:
    """The table in a question's metadata, empty without any; not to be changed by callers.

    Raises ValueError for text that is no JSON table.
    """
    value = json.loads(metadata) if metadata else {}
    if not isinstance(value, dict):
        raise ValueError(f"{metadata!r} is no JSON table")
    return value


def verifier_of(metadata: str | None) -> str | None:
    """Name of the verifier that a question brings; None of most."""
    name = read_metadata(metadata).get("verifier")
    return None if name is None else str(name)
