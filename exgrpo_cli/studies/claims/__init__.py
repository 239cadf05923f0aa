"""What papers say, in a form that can fail: `presets/claims/`, their runs and their verdicts."""
