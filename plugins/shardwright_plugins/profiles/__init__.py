"""Profiles of samples of the data: ids per bag, and how a table's ids behave towards caches."""

from shardwright_plugins.profiles.cache_statistics import cache_statistics
from shardwright_plugins.profiles.profile import Profile

__all__ = ["Profile", "cache_statistics"]
