"""Batches of recommender data, random or from Criteo's files on disk."""
