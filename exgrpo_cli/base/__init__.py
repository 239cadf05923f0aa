"""Shared by every package: types, errors, statistics, files and the console."""
