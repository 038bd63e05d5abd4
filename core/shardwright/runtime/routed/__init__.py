"""Tables whose ids travel to the ranks that own their rows.

All that depends on ranks, tables or features is decided when the module is sharded, as flat arrays for the local rank
(:mod:`.plan`); a step is a number of array operations that grows with none of them. The words used here:

- *block*: a part of a table's rows times a range of its columns, on a rank (:class:`shardwright.Block`).
- *bucket*: the ids of one feature that fall into one part of a row map; all of the feature's where rows are not cut.
- *slot*: one feature looked up in one block: it reads a bucket and brings columns of an output. Slots are sent in the
  order rank, kernel group, table, block, feature.
- *kernel group*: the blocks that one kernel looks up in one call on a rank.
- *bag*: the ids of one sample in a bucket; of sequences, each id. Of buckets of cut rows only bags with ids travel.
- *asked* is what this rank wants of others' blocks, *answered* what it looks up for them.
- *return path*: the way results take home, and gradients back; slots of one path share its collectives.
"""
