"""The `evalfleet` command. It talks to the service through the contract's client alone, and imports no heavy library
until a command needs it."""
