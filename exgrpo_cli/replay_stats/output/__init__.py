"""What `replay-stats` prints: tables and JSON."""
