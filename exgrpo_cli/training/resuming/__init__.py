"""What a run saves and how it goes on from it."""
