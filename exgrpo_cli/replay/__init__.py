"""The experience buffer: what is stored, what is drawn, the ledger on disk, and its statistics."""
