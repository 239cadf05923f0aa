"""From what was asked for to the first step."""
