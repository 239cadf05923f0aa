"""What another policy would have drawn from a run's ledger at each step, without training.

The buffer stays the recorded one: had the other policy really run, later steps would have found another buffer.
"""
