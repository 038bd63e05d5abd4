"""The HTTP server of a package; it imports torch and nothing of shardwright."""
