"""The contract of a compute kernel: what holds the weights of local blocks, looks them up and updates them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shardwright.contracts.kernel_request import KernelRequest, KernelWork
from shardwright.contracts.names import OpenNames
from shardwright.contracts.row_format import FLOATS, FloatRows, RowFormat
from shardwright.planning.tables.data_types import DataType

if TYPE_CHECKING:
    from shardwright.contracts.lookup import BlockSpec, Lookup
    from shardwright.planning.arrays import Floats

WEIGHTS = "weights"
"""Name of the column beside ids that looked-up vectors are multiplied by."""
NO_COLUMNS = ("", "values", "lengths", "offsets", "inverse_indices")
"""Names that no column has, since batches have others under them."""

__all__ = ["NAMED_ONLY", "ComputeKernel", "KernelRequest", "KernelWork"]

NAMED_ONLY = -100
"""Preference of a kernel that the planner takes only when it is asked for by name; no unit, below all others."""


class ComputeKernel(ABC, metaclass=OpenNames):
    """Holds local blocks, looks ids up in them, and updates them or shows their gradients.

    Kernels always sum; means are divided by the engine, once, for every sharding type. Capabilities are declared
    here, so that no caller asks for a kernel by name. A kernel object has no state; what it builds has.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    fuses_optimizer: ClassVar[bool] = True
    """True if the optimizer runs in the backward pass. Others show gradients and are taken only when asked for."""
    row_formats: ClassVar[tuple[RowFormat, ...]] = ()
    """Formats of rows that it reads beside torch's floats. Kernels that read one data type share its format."""
    preference: ClassVar[int] = 0
    """Among kernels of equal cost the planner takes the highest; one of ``NAMED_ONLY`` only when asked for by name."""
    batch_major: ClassVar[bool] = False
    """Shape of what its lookups return, see :class:`shardwright.contracts.lookup.Lookup`."""

    takes_ragged_bags: ClassVar[bool] = False
    """True if pooled lookups may have another number of bags for each slot, with results slot after slot. Of tables
    whose rows are cut only bags that have ids travel; for a kernel that takes no such bags the engine fills them up."""
    further_tiers: ClassVar[tuple[str, ...]] = ()
    """The names of memory tiers that it uses beside ``"device"`` and ``"host"``; a topology that has not all of them is
    not offered the kernel."""
    caches_rows: ClassVar[bool] = False
    """True if it keeps rows in another memory than the device's behind a cache, whose parameters a request has."""
    row_state: ClassVar[tuple[str, ...]] = ()
    """The names of what the :class:`~shardwright.contracts.lookup.RowIndex` of its lookups knows of each row, saved
    beside the weights: first the row's key. It then serves row maps that take any id, and no others; by default ids are
    rows."""

    @abstractmethod
    def supports(self, request: KernelRequest) -> Literal[True] | str:
        """``True``, or the reason why not."""

    @abstractmethod
    def memory_bytes(self, request: KernelRequest, num_rows: int) -> Mapping[str, int]:
        """Bytes per memory tier that a block of ``num_rows`` rows takes: weights and optimizer state.

        Returns:
            ``{tier: bytes}``; the tier ``"device"`` is the device's own memory, ``"host"`` the host's, others are
            those of ``further_tiers``.
        """

    def row_format(self, data_type: DataType) -> RowFormat | None:
        """The format of rows of a data type in its lookups; ``None`` if it reads none of that name."""
        own = next((one for one in self.row_formats if one.name == data_type), None)
        return FLOATS.get(data_type) if own is None else own

    def row_bytes(self, request: KernelRequest) -> int:
        """Bytes of a stored row of a block, for :meth:`memory_bytes`; 0 if it reads no such rows."""
        found = self.row_format(request.data_type)
        return 0 if found is None else found.row_bytes(request.num_columns)

    def refusal_of_rows(self, request: KernelRequest) -> str:
        """Explain why it does not read the rows of a table; empty if it may."""
        found = self.row_format(request.data_type)
        if found is None:
            known = (*(one.name for one in self.row_formats), *FLOATS)
            return f"it reads no rows of {request.data_type}, but of {', '.join(known)}"
        if isinstance(found, FloatRows) or (request.is_frozen and request.optimizer is None):
            return ""
        return (
            f"rows of {found.name} are looked up and not trained: plan with objective='serving', or freeze the table "
            "and give it no optimizer"
        )

    def refusal_of_weight_gradients(self) -> str:
        """Explain why the weights of ids that it looks up cannot be trained; empty if they can.

        A kernel whose rows stand in ``Lookup.weight``, numbered by the ids, needs no code of its own for that.
        """
        return "its ids are keys, whose rows it finds by itself" if self.row_state else ""

    def bandwidth_fraction(self, request: KernelRequest) -> float:
        """The part of the memory tier's bandwidth that lookups and updates reach, above 0 and up to 1."""
        return 1.0

    def times_ms(self, request: KernelRequest, work: KernelWork) -> tuple[Floats, Floats] | None:
        """Compute how long lookups and updates take, for a machine on which this kernel was not measured.

        By default ``None``: the kernel is then taken for a measured one, at its ``bandwidth_fraction``.

        Args:
            request: request that all blocks have.
            work: work of a step in those blocks.

        Returns:
            Milliseconds of the lookups and of the updates of each block: a pair of arrays ``[N]``, 0 or more. For one
            request always, also where ``N`` is 0, or never.
        """
        return None

    def reads(self, request: KernelRequest) -> Mapping[str, float]:
        """Return the memory tiers that hold the rows that a step looks up.

        Returns:
            ``{tier: part of the rows}``, tiers named as in :meth:`memory_bytes`; parts are 0 or more and add up to 1.
        """
        return {"device": 1.0}

    def extras(self, request: KernelRequest) -> Mapping[str, Any]:
        """Return what the plan must say of a table and the table's own module does not, as JSON data with string keys.

        It stands among the ``extras`` of the plan's entry, and so of the requests of a run. What a kernel reads in the
        ``extras`` of constraints reaches a run this way.
        """
        return {}

    def columns(self, request: KernelRequest) -> Mapping[str, str]:
        """Name the columns of ids, beside weights, that lookups of a table get in :attr:`~shardwright.Bags.columns`.

        Every batch of the table's collection must then have them. They travel with all ids of the collection, 8 or 4
        bytes each; must follow from the plan alone.

        Returns:
            ``{name: dtype}``, dtypes ``"int64"`` or ``"float32"``; names are none of :data:`NO_COLUMNS`, and not
            :data:`WEIGHTS`.
        """
        return {}

    def group_key(self, request: KernelRequest) -> Hashable:
        """Blocks with equal keys are built and looked up together, in one call; must follow from the plan alone."""
        return (request.data_type, request.optimizer)

    def needs_whole_rows(self, request: KernelRequest) -> bool:
        """True if the update of a block needs the gradient of all the table's columns, not of its own alone.

        So a row-wise optimizer stays exact on a table whose columns are cut: the engine then sends the gradient of
        whole rows to each column block.
        """
        return False

    def gives_equal_bits(self, request: KernelRequest) -> bool:
        """True if equal batches give equal bits: an update adds gradients up in an order that follows from its ids.

        Ranks then may each make the whole batch's update of their copies of a table; else one sum goes to all of them.
        """
        return True

    @abstractmethod
    def build(self, blocks: Sequence[BlockSpec], *, device: Any) -> Lookup:
        """Allocate the blocks of one group on ``device`` and return what looks them up.

        Args:
            blocks: the local blocks, in the engine's order.
            device: a ``torch.device``.
        """


EmbeddingComputeKernel = ComputeKernel
"""TorchRec's name: ``EmbeddingComputeKernel.FUSED.value`` names a registered kernel."""
