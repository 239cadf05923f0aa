"""What a terminal shows of long work, and the signals that end it."""
