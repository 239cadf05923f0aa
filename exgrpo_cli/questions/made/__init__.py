"""Questions that the program makes itself, and the traces from which the tiny backbone learns their tasks."""
