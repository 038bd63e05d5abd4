"""What a sample of batches says of tables: ids per bag, samples, and how their ids behave towards caches."""

from shardwright_plugins.profiles.cache_statistics import cache_statistics
from shardwright_plugins.profiles.profile import Profile

__all__ = ["Profile", "cache_statistics"]
