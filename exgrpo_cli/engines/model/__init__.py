"""A transformers model as both the generator and the policies run it."""
