"""The reference generator: sampling with a transformers model."""
