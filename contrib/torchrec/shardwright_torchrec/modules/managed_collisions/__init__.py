"""Managed collisions: ids of any size become rows of a table, and the ids that matter least lose theirs.

Sharded models keep one map on all ranks. Ranks gather the ids that they saw once an interval, and each makes the same
update, so that a sharded model maps ids as one process with all batches would, under any sharding type.
"""
