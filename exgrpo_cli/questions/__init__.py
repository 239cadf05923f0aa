"""Questions in: sources, the canonical file, prompts, the arithmetic generator, the question stream."""
