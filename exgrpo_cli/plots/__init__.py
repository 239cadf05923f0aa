"""From a run folder to figures."""
