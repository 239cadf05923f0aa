"""Checks on a question set: what they remove, what they find, and the report."""
