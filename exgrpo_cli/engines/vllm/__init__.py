"""Rollouts by vLLM in the process of the trainer."""
