"""One step, part by part: rollouts, what the buffer is told and gives, the mini-batches, what is watched."""
