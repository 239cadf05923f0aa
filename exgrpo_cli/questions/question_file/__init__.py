"""The question file: identity, canonical rows, reading and writing."""
