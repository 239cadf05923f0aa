"""Experience replay: places of replayed rows, the store of a run, draws and priorities, warm start from another run."""
