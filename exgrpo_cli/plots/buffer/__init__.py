"""Figures of the experience buffer and of what is drawn from it."""
