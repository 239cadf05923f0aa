"""What a run shows: statistics declared once, read by tables, `--json`, figures and pages."""
