"""What a finished run is compared by: its held-out scores, what it memorised, and whether its traces are valid."""
