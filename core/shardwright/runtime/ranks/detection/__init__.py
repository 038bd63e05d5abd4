"""Detection of what a machine has, for plans of models that are trained on it: memory, and bandwidths of its links."""
