"""Benchmarks, the evaluation runner, and the statistics of a score."""
