"""Measurement of real steps: what ``calibrate``, ``bench truth`` and estimators that learn from measurements share."""
