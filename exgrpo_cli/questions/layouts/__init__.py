"""Layouts of public question sets: which columns hold the question, the gold answer and the options."""
