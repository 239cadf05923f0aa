"""Two steps with random weights at full lengths, measured: what a run would need here, and whether all works."""
