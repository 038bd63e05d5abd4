"""Demands on a table that not every compute kernel obeys, and their comparison with what a kernel declares.

Planner and engine ask the same :func:`disobeyed`, so that what is asked of a table is done or refused by name. What
else can be asked is done by the engine for all kernels (``max_gradient``, codecs where :func:`refusal_of_sums` says
nothing), or is in the kernel's request, of which its ``supports`` judges (data type, parameters of an optimizer, cut
columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from shardwright.contracts.codec import Codec
from shardwright.contracts.compute_kernel import ComputeKernel
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import PoolingType, TableSpec


@frozen
class Demand:
    """Something that is asked of a table.

    Args:
        name: its name in errors, that of the table's field or of the constraint.
        is_obeyed_by: function that tells from a kernel's declarations whether it obeys.
        reason: reason why other kernels do not.
        instead: requests to make instead.
    """

    name: str
    is_obeyed_by: Callable[[ComputeKernel], bool]
    reason: str
    instead: str

    def refusal(self, table: TableSpec) -> str:
        """Explain why a kernel that does not obey cannot have a table."""
        asked = getattr(table, self.name, None)
        told = "" if asked is None else f", and the table's {self.name} is {asked}"
        return f"{self.reason}{told}: {self.instead}"


OPTIMIZER = Demand(
    "optimizer",
    lambda kernel: kernel.fuses_optimizer,
    "it runs no optimizer, but shows gradients to one of yours",
    "leave the optimizer out of fused_params and apply_optimizer_in_backward and step your own, or take a kernel that "
    "runs it",
)
UPDATE = Demand(
    "update",
    lambda kernel: not kernel.row_state,
    "it gives rows to ids by itself, and may have given a row to another id before the step",
    "shard it with update='in_backward'",
)
CACHE = Demand(
    "cache_params",
    lambda kernel: kernel.caches_rows,
    "it has no cache of rows, nor has any other kernel that the constraints name",
    "leave cache_params out, or name a kernel that has one",
)
KEYS = Demand(
    "compute_kernel",
    lambda kernel: bool(kernel.row_state),
    "its ids are rows, and the layout sends it keys",
    "take a kernel that finds the rows of keys, or another sharding type",
)
ROWS = Demand(
    "compute_kernel",
    lambda kernel: not kernel.row_state,
    "its ids are keys, and the layout sends it rows",
    "take a kernel whose ids are rows, or a sharding type of keys",
)


def demands_on(
    table: TableSpec,
    row_map: RowMap | None = None,
    rule: ParameterConstraints | None = None,
    named: Sequence[ComputeKernel] = (),
) -> Iterator[Demand]:
    """List the demands on a table.

    Args:
        table: specification of the table.
        row_map: row map of its layout; ``None``: no layout is chosen.
        rule: the user's constraints on it.
        named: compute kernels that these name. Parameters of a cache are for kernels that have one, should one be
            taken: they are a demand where none of these has.
    """
    if row_map is not None:
        yield KEYS if row_map.takes_any_id else ROWS
    optimizer = None if table.is_frozen else table.optimizer
    if optimizer is not None and not optimizer.is_assumed:
        yield OPTIMIZER
    if optimizer is not None and table.update == "in_step":
        yield UPDATE
    cache = None if rule is None else rule.cache_params
    # Statistics say how a table is used, as a profile measures it: alone they ask for no cache.
    wants_cache = cache is not None and (cache.load_factor is not None or cache.stats is None)
    if wants_cache and named and not any(map(CACHE.is_obeyed_by, named)):
        yield CACHE


def disobeyed(kernel: ComputeKernel, demands: Iterator[Demand]) -> Demand | None:
    """The first of some demands that a kernel does not obey; ``None`` if it obeys all."""
    return next((demand for demand in demands if not demand.is_obeyed_by(kernel)), None)


def refusal_of_sums(table: TableSpec, codec: Codec | None, *, cuts_rows: bool) -> str:
    """Explain why results of a table cannot travel by a codec; empty if they can.

    Args:
        table: specification of the table.
        codec: codec of its results; ``None``: they travel as they are.
        cuts_rows: its rows are cut, so that pooled results are partial sums.
    """
    if codec is None or codec.carries_partial_sums or not cuts_rows or table.pooling is PoolingType.NONE:
        return ""
    return (
        f"results are to travel by the codec {codec.name!r}, which does not carry partial sums, and the "
        f"{table.num_embeddings:_} rows are cut"
    )
