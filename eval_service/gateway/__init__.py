"""The HTTP API: stateless, any number of replicas, everything it needs is in the ledger."""
