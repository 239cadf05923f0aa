"""The processes of one run: which one this is, what they share, how they are started."""
