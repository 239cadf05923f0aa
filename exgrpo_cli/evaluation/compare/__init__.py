"""Several results held against each other."""
