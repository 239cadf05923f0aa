"""What another policy would have drawn."""
