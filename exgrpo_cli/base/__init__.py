"""Shared by every package: types, errors, statistics, files, the console, the processes of a run."""
