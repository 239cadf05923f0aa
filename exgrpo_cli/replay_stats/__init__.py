"""What `replay-stats` shows of a run, from its ledger and metrics alone."""
