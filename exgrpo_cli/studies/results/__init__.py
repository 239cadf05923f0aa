"""What the runs of a study show: endpoints, tests, tables, figures, the report."""
