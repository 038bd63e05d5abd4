"""Number of collectives in a step, from what the dataflows promise and nothing of the engine.

Legend: W ranks, B bags of a rank, N ids of a rank, R rows of a copy, D columns of its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence

from attrs import frozen

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.host.plugin_host import host
from shardwright.planning.layouts.layout import Layout, Routed
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.routed.tables import return_path_of
from shardwright.sparse import KeyedJaggedTensor
from shardwright_testing.equality.cases import Case, shardings_of

_ID_BYTES, _LENGTH_BYTES, _FLOAT_BYTES = 8, 4, 4
# Time of a byte of each form of copies' updates, as the engine's documentation states it.
_EFFORT = {"batch": 1, "rows": 2, "dense": 1}


def expected_collectives(case: Case, num_steps: int) -> list[int]:
    """The collectives of each training step: headers, ids, results home, gradients back, and updates of copies.

    Results of tables that sum inside the host take two each way if there are several hosts. Copies are synchronised, if
    there is anybody to talk to, in whichever form takes least by its bytes: one collective for all that send the
    batch's ids or the rows touched (none, if nobody has any), two for all that sum dense gradients.
    """
    specs = case.specs()
    plan = shardings_of(case, specs)
    routed = {
        dataflow for own in plan.values() for dataflow in own.layout.dataflows if isinstance(dataflow, Routed)
    }
    paths = {return_path_of(dataflow, is_pooled=case.is_pooled) for dataflow in routed}
    is_summed = case.is_pooled and any(dataflow.sums_inside_host for dataflow in routed)
    crosses = is_summed and case.local_world_size not in (None, case.world_size)
    count = 1 + 3 * bool(paths) + 4 * crosses - 2 * (crosses and len(paths) == 1)
    copied = {name: parts for name, own in plan.items() if (parts := _replicated(own.layout))}
    if case.world_size == 1 or not copied:
        return [count] * num_steps
    kernels = {name: plan[name].compute_kernel for name in copied}
    return [count + _of_copies(case, step, specs, copied, kernels) for step in range(num_steps)]


def _of_copies(
    case: Case,
    step: int,
    specs: Sequence[TableSpec],
    copied: Mapping[str, Sequence[Layout]],
    kernels: Mapping[str, str],
) -> int:
    """The collectives in which the copies of a step are synchronised."""
    batches = [case.batch_to_shard(step, rank) for rank in range(case.world_size)]
    copies = [
        copy
        for spec in specs
        for part in copied.get(spec.name, ())
        for copy in _copies_of(spec, part, kernels[spec.name], batches)
    ]
    # Copies that one kernel looks up in one call take one form.
    groups: dict[Hashable, Counter[str]] = {}
    for copy in copies:
        groups.setdefault(copy.group, Counter()).update(_bytes_of_forms(copy, case, batches))
    sizes = list(groups.values())
    chosen = [_cheapest(own) for own in sizes]
    sends = any(own[form] for own, form in zip(sizes, chosen, strict=True) if form != "dense")
    return sends + 2 * ("dense" in chosen)


def _cheapest(bytes_of: Mapping[str, int]) -> str:
    """The form that takes least by its bytes; the first of equals."""
    return min(bytes_of, key=lambda form: _EFFORT[form] * bytes_of[form])


@frozen
class _Copy:
    """A block of which every rank has a copy.

    Args:
        num_rows: ``R``.
        dim: ``D``.
        num_ids: ids of each feature that are rows of it, for each rank.
        group: key of the copies that are looked up and updated together.
    """

    num_rows: int
    dim: int
    num_ids: Sequence[tuple[int, ...]]
    group: Hashable

    def rooms(self) -> list[int]:
        """Count the rows that each rank's ids can touch."""
        return [min(sum(own), self.num_rows) for own in self.num_ids]


def _replicated(layout: Layout) -> list[Layout]:
    """Return the parts of a layout that are copied to every rank."""
    return [layout.served_by([dataflow]) for dataflow in layout.dataflows if dataflow.is_replicated]


def _copies_of(
    spec: TableSpec, part: Layout, kernel_name: str, batches: Sequence[KeyedJaggedTensor]
) -> Iterator[_Copy]:
    """A table's copies."""
    kernel = host().compute_kernels.create(kernel_name)
    ids = [[batch[name].values() for name in spec.feature_names] for batch in batches]
    for block in part.distinct_blocks():
        request = KernelRequest.of(
            spec, block.num_columns, device="cpu", on_this_machine=True, first_column=block.columns.start
        )
        dim = spec.embedding_dim if kernel.needs_whole_rows(request) else block.num_columns
        found = [
            tuple(int((part.row_map.part_of(values) == block.rows.index).sum()) for values in own)
            for own in ids
        ]
        if block.num_rows:
            is_matrix = request.is_pooled and kernel.batch_major
            widths = None if is_matrix else (block.num_columns, dim)
            group = (part.blocks[0].num_rows, kernel_name, kernel.group_key(request), part.maps_rows, widths)
            yield _Copy(block.num_rows, dim, found, group)


def _bytes_of_forms(copy: _Copy, case: Case, batches: Sequence[KeyedJaggedTensor]) -> dict[str, int]:
    """Compute the bytes that all ranks together send in each form; the first of two that send as many is taken."""
    others = case.world_size - 1
    return {
        "batch": others * sum(_batch_bytes(copy, case, *each) for each in enumerate(batches)),
        "rows": others * sum(_row_bytes(room, copy.dim) for room in copy.rooms()),
        # Summed in slices: each rank sends and receives (W - 1) / W of it twice, with a flag a row.
        "dense": 2 * others * _FLOAT_BYTES * copy.num_rows * (copy.dim + 1),
    }


def _row_bytes(room: int, dim: int) -> int:
    return _ID_BYTES * room + _whole_words(_FLOAT_BYTES * room * dim)


def _batch_bytes(copy: _Copy, case: Case, rank: int, batch: KeyedJaggedTensor) -> int:
    """Ids; lengths of bags; weights; and the gradient of each bag or, of sequences, id."""
    own = copy.num_ids[rank]
    num_ids = sum(own)
    num_bags = batch.stride() * len(own) if case.is_pooled else num_ids
    size = _ID_BYTES * num_ids + _whole_words(_FLOAT_BYTES * num_bags * copy.dim)
    if case.is_pooled:
        size += _whole_words(_LENGTH_BYTES * num_bags)
    return size + _whole_words(_FLOAT_BYTES * num_ids) * case.is_weighted


def _whole_words(size: int) -> int:
    """Every piece is filled up to a multiple of 8 bytes."""
    return -(-size // 8) * 8
