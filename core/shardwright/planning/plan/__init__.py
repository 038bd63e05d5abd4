"""The plan, and its document: written, read, and compared with what sharding types say."""
