"""Replicated tables: every rank looks up its own batch in its own copy; updates are synchronised, not results.

In the backward pass the ranks exchange what each table needs in the form that moves the fewest bytes; every rank then
makes the same update from the same numbers in the same order, so that copies stay equal, bit for bit:

- *batch*: every rank's ids and output gradients (by their codecs); each rank then makes the whole batch's update;
- *rows*: the rows touched and their gradients;
- *dense*: the gradient of all rows, summed.

The forms are private to this folder: what a form may do follows from what kernels offer.
"""
