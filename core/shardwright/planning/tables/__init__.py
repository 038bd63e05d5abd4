"""Tables and what is asked for them: specifications, constraints, optimizers, caches, codecs; workloads."""
