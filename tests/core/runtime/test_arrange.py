"""Outputs made of arrivals, and arrivals' gradients, against loops over single elements."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.plans import cuts, host_with_loops
from tests.core.runtime.streams import EXAMPLES

from shardwright.planning.tables import TableSpec
from shardwright.plugins import use_host
from shardwright.runtime.arrange import ArrangedGradients, PooledArrangement, SequenceArrangement
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.runtime.groups import Arrival
from shardwright.runtime.routing import Router

SCALE = 0.25


def arrivals_of(plan):
    return [slot.arrival for rank in range(plan.world_size) for slot in plan.slots_of(rank)]


@EXAMPLES
@given(cuts(), st.integers(0, 3), st.integers(0, 9))
def test_pooled_arrangement_adds_arrivals_and_divides_means(case, batch_size, seed):
    with use_host(host_with_loops()):
        arrivals = arrivals_of(case.plan())
    collection, batch = case.collection(), case.read(case.batch(batch_size, seed))
    divisor = torch.ones(batch_size, collection.width)
    for output in collection.outputs:
        if case.tables[output.table].pooling == "MEAN":
            divisor[:, output.start : output.stop] = batch.lengths[output.feature].clamp(min=1)[:, None]
    arrangement = PooledArrangement(collection, arrivals, gradient_scale=SCALE)
    starts = [collection.outputs[arrival.output].start + arrival.columns[0] for arrival in arrivals]

    views = [torch.rand(batch_size, arrival.dim) for arrival in arrivals]
    kept = [view.clone() for view in views]
    expected = torch.zeros(batch_size, collection.width)
    for view, start in zip(views, starts, strict=True):
        for sample in range(batch_size):
            for column in range(view.shape[1]):
                expected[sample, start + column] += view[sample, column]
    (output,) = arrangement.outputs(views, [None] * len(arrivals), batch)
    torch.testing.assert_close(output, expected / divisor)
    assert all(torch.equal(view, before) for view, before in zip(views, kept, strict=True))

    gradient = torch.rand(batch_size, collection.width)
    before = gradient.clone()
    gradient_of = ArrangedGradients(arrangement, arrangement.divided([gradient], batch), lambda arrival: None)
    wanted = tuple(arrivals)
    for _ in range(2):
        pieces = gradient_of.unscaled(wanted)
        for arrival, start, piece in zip(arrivals, starts, pieces, strict=True):
            own = (gradient * SCALE / divisor)[:, start : start + arrival.dim]
            torch.testing.assert_close(gradient_of(arrival), own)
            torch.testing.assert_close(piece * gradient_of.scale, own)
    assert torch.equal(gradient, before)


@EXAMPLES
@given(cuts(is_pooled=False), st.integers(0, 3), st.integers(0, 9))
def test_sequence_arrangement_puts_each_ids_columns_in_their_place(case, batch_size, seed):
    with use_host(host_with_loops()):
        plan = case.plan()
    collection, arrivals = case.collection(), arrivals_of(plan)
    batch = case.read(case.batch(batch_size, seed))
    routed = Router(plan).route(batch)
    places = [routed.positions[arrival.stream] for arrival in arrivals]
    arrangement = SequenceArrangement(collection, arrivals, gradient_scale=SCALE)

    counts = [routed.ids[arrival.stream].numel() for arrival in arrivals]
    views = [torch.rand(count, arrival.dim) for count, arrival in zip(counts, arrivals, strict=True)]
    kept = [view.clone() for view in views]
    expected = [
        torch.full((batch.ids[output.feature].numel(), output.dim), torch.nan)
        for output in collection.outputs
    ]
    for view, place, arrival in zip(views, places, arrivals, strict=True):
        for index in range(view.shape[0]):
            for column in range(arrival.dim):
                row = index if place is None else int(place[index])
                expected[arrival.output][row, arrival.columns[0] + column] = view[index, column]
    outputs = arrangement.outputs(views, places, batch)
    assert [tuple(output.shape) for output in outputs] == [tuple(output.shape) for output in expected]
    for output, values in zip(outputs, expected, strict=True):
        assert torch.equal(output, values)  # nothing is left out: a nan equals nothing
    for output in outputs:
        output.zero_()  # the outputs are the user's: what came home stays as it is
    assert all(torch.equal(view, before) for view, before in zip(views, kept, strict=True))

    gradients = [torch.rand_like(values) for values in expected]
    gradient_of = ArrangedGradients(
        arrangement,
        arrangement.divided(gradients, batch),
        lambda arrival: routed.positions[arrival.stream],
    )
    pieces = gradient_of.unscaled(tuple(arrivals))
    for place, arrival, count, piece in zip(places, arrivals, counts, pieces, strict=True):
        rows = list(range(count)) if place is None else place.tolist()
        own = gradients[arrival.output][rows][:, slice(*arrival.columns)] * SCALE
        torch.testing.assert_close(gradient_of(arrival), own)
        torch.testing.assert_close(piece * gradient_of.scale, own)


def test_pooled_arrangement_takes_large_results_that_stand_side_by_side_as_they_are():
    batch_size, dims = 700, (64, 32, 4)
    tables = [TableSpec(f"t{index}", 9, dim, (f"f{index}",)) for index, dim in enumerate(dims)]
    collection = Collection.of(tables)
    arrivals = [Arrival(index, (0, dim)) for index, dim in enumerate(dims)]
    arrangement = PooledArrangement(collection, arrivals, gradient_scale=SCALE)
    batch = FeatureBatch(torch.ones(3, batch_size, dtype=torch.int32), [torch.zeros(batch_size)] * 3, None)
    result = torch.rand(batch_size, sum(dims))

    (output,) = arrangement.outputs(result.split(dims, dim=1), [None] * 3, batch)
    assert output.data_ptr() == result.data_ptr()
    assert torch.equal(output, result)

    wider = torch.rand(batch_size, sum(dims) + 1)
    elsewhere = [wider[:, :64], wider[:, 64:96], wider[:, 97:]]
    (output,) = arrangement.outputs(elsewhere, [None] * 3, batch)
    assert output.data_ptr() != wider.data_ptr()
    assert torch.equal(output, torch.cat(elsewhere, dim=1))
