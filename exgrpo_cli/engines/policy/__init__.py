"""Policies: scoring and updates of all rows, on one device or sharded by DeepSpeed."""
