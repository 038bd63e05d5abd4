"""The built-in plugins of shardwright, one folder a kind, registered as everybody else's are."""
