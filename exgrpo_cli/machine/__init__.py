"""What this machine has, and what a run would need of it."""
