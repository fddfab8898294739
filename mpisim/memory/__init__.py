"""Bytes held: the ledger of a running rank."""
