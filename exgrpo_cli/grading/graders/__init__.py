"""Graders: from the graded text of a response to a verdict."""
