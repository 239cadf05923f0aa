"""Rollout and training engines behind two protocols, Generator and Policy."""
