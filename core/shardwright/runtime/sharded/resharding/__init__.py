"""Resharding: a running model goes from one plan to another, its rows and optimizer states with it."""
