"""Benchmarks: presets, questions and the order of multiple-choice options."""
