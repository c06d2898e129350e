"""The policy network: its sizes, its forward pass, its files, its sharding."""
