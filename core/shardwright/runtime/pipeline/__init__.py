"""Training pipelines: batches that are moved and exchanged ahead."""
