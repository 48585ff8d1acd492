"""The SFT trainer on megatron-core: it exports snapshots and calls the service; it knows only its contract."""
