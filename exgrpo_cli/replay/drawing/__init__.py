"""How questions, trajectories and units are drawn."""
