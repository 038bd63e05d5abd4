"""What a stream must hold, by loops over single ids."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings

EXAMPLES = settings(max_examples=120, deadline=None)


def bags_of(batch, feature):
    """Lists of (id, weight), one a bag."""
    jagged = batch[feature]
    weights = jagged.weights_or_none()
    weights = [1.0] * len(jagged.values()) if weights is None else weights.tolist()
    pairs = list(zip(jagged.values().tolist(), weights, strict=True))
    offsets = jagged.offsets().tolist()
    return [pairs[start:stop] for start, stop in pairwise(offsets)]


def stream_bags(case, stream, batch):
    """What a stream must hold: for each bag the ids of its row part, as rows of that part."""
    place = None
    if stream.row_map is not None:
        rows = [stream.row_map.rows_of(part) for part in range(stream.row_map.num_parts)]
        whole = range(stream.row_map.num_rows)
        held = [list(whole[part]) if isinstance(part, slice) else part.tolist() for part in rows]
        place = {row: local for local, row in enumerate(held[stream.part])}
    return [
        [(id if place is None else place[id], weight) for id, weight in bag if place is None or id in place]
        for bag in bags_of(batch, case.collection().features[stream.feature])
    ]


def assert_bags(lengths, ids, weights, expected):
    if lengths is not None:
        assert lengths.tolist() == [len(bag) for bag in expected]
    assert ids.tolist() == [id for bag in expected for id, _ in bag]
    if weights is not None:
        assert weights.tolist() == [weight for bag in expected for _, weight in bag]
