"""Studies through submitit: one array job for arms x seeds on Slurm, or the same tasks as processes of this machine."""
