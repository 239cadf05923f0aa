"""The run folder: its files, names and step metrics."""
