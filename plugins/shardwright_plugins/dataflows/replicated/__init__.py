"""Replicated tables: every rank looks up its own batch in its own replica; updates are synchronised, not results.

In the backward pass the ranks exchange gradients of each table in the form that moves the fewest bytes. Then every rank
makes the same update from the same numbers in the same order, so that replicas stay equal, bit for bit. The forms are:

- *batch*: every rank's ids and output gradients (by their codecs); each rank then makes the whole batch's update;
- *rows*: the rows touched and their gradients;
- *dense*: the gradient of all rows, summed.

The forms are private to this folder, because they depend on what kernels offer.
"""
