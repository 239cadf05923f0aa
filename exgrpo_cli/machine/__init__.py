"""Resources of this machine, and what a run would need of them."""
