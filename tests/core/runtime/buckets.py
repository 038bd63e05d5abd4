"""What a bucket must hold, by loops over single ids."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings

EXAMPLES = settings(max_examples=60, deadline=None)


def bags_of(batch, feature):
    """Lists of (id, weight), one a bag; without weights the column `count` stands for them."""
    jagged = batch[feature]
    weights = jagged.weights_or_none()
    weights = jagged.columns().get("count") if weights is None else weights
    weights = [1.0] * len(jagged.values()) if weights is None else weights.tolist()
    pairs = list(zip(jagged.values().tolist(), weights, strict=True))
    offsets = jagged.offsets().tolist()
    return [pairs[start:stop] for start, stop in pairwise(offsets)]


def bucket_bags(case, reading, part, batch):
    """What a bucket must hold: for each sample the ids of the row part, as rows of that part."""
    place = None
    if reading.row_map is not None:
        rows = [reading.row_map.rows_of(part) for part in range(reading.row_map.num_parts)]
        whole = range(reading.row_map.num_rows)
        held = [list(whole[own]) if isinstance(own, slice) else own.tolist() for own in rows]
        place = {row: local for local, row in enumerate(held[part])}
    return [
        [(id if place is None else place[id], weight) for id, weight in bag if place is None or id in place]
        for bag in bags_of(batch, case.collection().features[reading.feature])
    ]


def slot_bags(case, plan, slot, batch):
    """What a slot must get: the bags that travel, each of a list of (id, weight), and the sample of each."""
    piece = plan.slots.piece[slot]
    reading, kind = plan.readings[plan.pieces.reading[piece]], plan.kinds[plan.pieces.group[piece]]
    bags = list(enumerate(bucket_bags(case, reading, plan.slots.part[slot], batch)))
    if not case.is_pooled:
        return [(sample, [pair]) for sample, bag in bags for pair in bag]
    return [(sample, bag) for sample, bag in bags if bag or not kind.is_ragged]


def assert_bags(lengths, ids, columns, expected):
    if lengths is not None:
        assert lengths.tolist() == [len(bag) for bag in expected]
    assert ids.tolist() == [id for bag in expected for id, _ in bag]
    weights = [weight for bag in expected for _, weight in bag]
    if "weights" in columns:
        assert columns["weights"].tolist() == weights
        of_weight = {"count": lambda weight: int(weight * 2**24), "time": lambda weight: 1 - weight}
    else:
        of_weight = {"count": lambda count: count, "time": lambda count: 1 - count / 2**24}
    for name, function in of_weight.items():
        if name in columns:
            assert columns[name].tolist() == [function(weight) for weight in weights]
