"""Whole models: their plan, their sharded collections, their dense part, and replicas of them."""
