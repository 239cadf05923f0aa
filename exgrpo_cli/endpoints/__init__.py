"""Outcomes of a finished run: its held-out scores, what it memorised, and whether its traces are valid."""
