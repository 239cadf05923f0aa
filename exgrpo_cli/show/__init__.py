"""Statistics of runs, declared once, read by tables, `--json`, figures and pages."""
