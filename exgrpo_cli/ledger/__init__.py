"""The experience ledger on disk: append-only tables in open formats, written by one and read by many."""
