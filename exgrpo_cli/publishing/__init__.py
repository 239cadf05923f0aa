"""Runs and studies on the Hugging Face hub: a model with its card, the ledger as a data set, a study as tables."""
