"""Display of long work on a terminal, and the signals that end it."""
