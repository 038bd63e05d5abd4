"""The request to a compute kernel, for one block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.data_types import DataType
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec

if TYPE_CHECKING:
    from shardwright.planning.arrays import Floats


@frozen(eq=False)
class KernelWork:
    """Work of a step in ``N`` blocks of one request, as columns: what a kernel computes its time from.

    Arrays are read-only. Columns, data type and optimizer are in the request; a kernel's ``row_bytes`` says how large a
    stored row is.

    Args:
        ids: ids looked up, of all ranks whose batches come to the block: ``[N]``.
        distinct_rows: distinct rows among them: ``[N]``.
        vectors: vectors returned, one a bag, or one an id of sequences: ``[N]``.
        num_rows: rows of the block: ``[N]``.
        bytes_per_ms: bandwidth of the memory that holds the rows, as one rank reaches it.
    """

    ids: Floats
    distinct_rows: Floats
    vectors: Floats
    num_rows: Floats
    bytes_per_ms: float


@frozen(cache_hash=True)
class KernelRequest:
    """Request to a kernel, for one block.

    Args:
        device: type of the device (``"cpu"``, ``"cuda"``, ...).
        data_type: name of the form in which rows are stored.
        embedding_dim: columns of the whole table.
        num_columns: columns of the block.
        first_column: first of the block's columns in the table (0 while planning).
        is_pooled: one vector per bag, else one per id.
        is_weighted: ids carry weights.
        optimizer: applied in the backward pass; ``None`` asks for visible gradients.
        cache: the cache on the device, for kernels that keep weights elsewhere.
        on_this_machine: the kernel is to run on this machine, so what is installed here counts.
        is_frozen: the table is looked up and never updated. With ``optimizer=None`` nothing that goes through it is
            trained either, such as the weights of ids: a kernel may have no backward pass.
        extras: JSON data of plugins. While planning, what the table's constraints have, under what the sharding type's
            layout has; in a run, what the plan has.
    """

    device: str
    data_type: DataType = field(converter=DataType)
    embedding_dim: int
    num_columns: int
    is_pooled: bool = True
    is_weighted: bool = False
    optimizer: OptimizerSpec | None = None
    on_this_machine: bool = False
    first_column: int = 0
    cache: CacheParams = field(factory=CacheParams)
    is_frozen: bool = False
    extras: Mapping[str, Any] = field(factory=dict, hash=False)

    @classmethod
    def of(
        cls,
        table: TableSpec,
        num_columns: int,
        *,
        device: str,
        on_this_machine: bool = False,
        first_column: int = 0,
        extras: Mapping[str, Any] | None = None,
    ) -> KernelRequest:
        """The request for a block of ``num_columns`` columns of ``table``."""
        return cls(
            device=device,
            data_type=table.data_type,
            embedding_dim=table.embedding_dim,
            num_columns=num_columns,
            is_pooled=table.pooling.value != "NONE",
            is_weighted=table.is_weighted,
            optimizer=table.optimizer,
            on_this_machine=on_this_machine,
            first_column=first_column,
            cache=table.cache,
            is_frozen=table.is_frozen,
            extras=extras or {},
        )

    @property
    def cuts_columns(self) -> bool:
        """The block has fewer columns than its table."""
        return self.num_columns < self.embedding_dim
