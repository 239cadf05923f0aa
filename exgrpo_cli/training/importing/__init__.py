"""Rollouts that were logged elsewhere: read, checked and kept as a ledger that a run can replay from."""
