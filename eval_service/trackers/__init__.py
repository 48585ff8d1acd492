"""Curves, webhooks and traces for those who are outside: told from the ledger, behind a cursor for each of them."""
