"""Batches on their way into a step: searched, checked, announced in headers, exchanged ahead."""
