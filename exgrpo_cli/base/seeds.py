"""Seeds of rollouts, keyed by what is sampled instead of by the order of draws."""

import hashlib


def rollout_seed(seed: int, question_id: str, visit: int, member: int) -> int:
    """A 63-bit seed for one rollout: member `member` of the group sampled at visit `visit` of a question.

    A hash of the four values, so a rollout keeps its seed when other questions are added, dropped or finished first.
    """
    key = f"{seed}\x1f{question_id}\x1f{visit}\x1f{member}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"exgrpo-rollout").digest(), "big") >> 1
