"""The values and interfaces of TorchRec's planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import shardwright as sw
from shardwright_torchrec.planner.constants import BATCH_SIZE


@dataclass(eq=True)
class Perf:
    """Time of a shard, ms a step, by phase."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """Time of all phases but the distribution of ids, ms, as TorchRec has it."""
        return self.fwd_compute + self.fwd_comms + self.bwd_compute + self.bwd_comms + self.prefetch_compute

    def __add__(self, other: Perf) -> Perf:
        return Perf(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))


@dataclass(eq=True, order=True)
class Storage:
    """Memory of a shard or a device, bytes, by tier."""

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(self.hbm + other.hbm, self.ddr + other.ddr, self.ssd + other.ssd)

    def __sub__(self, other: Storage) -> Storage:
        return Storage(self.hbm - other.hbm, self.ddr - other.ddr, self.ssd - other.ssd)

    def __hash__(self) -> int:
        return hash((self.hbm, self.ddr, self.ssd))

    def fits_in(self, other: Storage) -> bool:
        """True if no tier needs more than another has."""
        return self.hbm <= other.hbm and self.ddr <= other.ddr and self.ssd <= other.ssd


@dataclass
class DeviceHardware:
    """A rank with the memory that it has left and the time that it takes, ms."""

    rank: int
    storage: Storage
    perf: Perf = field(default_factory=lambda: Perf(0, 0, 0, 0))


@dataclass
class Shard:
    """A shard of a table: rows and columns, the first of each, its costs, and its rank once it is placed."""

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.size), tuple(self.offset), self.storage, self.perf, self.rank))


class ShardingOption:
    """One way to shard a table.

    Args:
        name: name of the table.
        tensor: weights of the table, on `meta`.
        module: path of the module and the module; planning by tables has none.
        input_lengths: ids per bag of each feature.
        batch_size: samples per rank and step.
        sharding_type: name of the sharding type.
        partition_by: one of `PartitionByType`'s values.
        compute_kernel: name of the compute kernel.
        shards: the shards.
        further: fields of TorchRec's that are kept as they are (`cache_params`, `dependency`, ...).

    Attributes:
        index: number of the option among shardwright's columns; -1 for one that a script made.
        own_kernel: shardwright's name of the compute kernel; empty for one that a script made.
    """

    def __init__(
        self,
        name: str,
        tensor: Any,
        module: tuple[str, Any],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        partition_by: str,
        compute_kernel: str,
        shards: list[Shard],
        **further: Any,
    ) -> None:
        self.name, self.tensor, self.module = name, tensor, module
        self.input_lengths, self.batch_size = input_lengths, batch_size
        self.sharding_type, self.compute_kernel = sharding_type, compute_kernel
        self.partition_by, self.shards = partition_by, shards
        self.is_pooled: bool = further.pop("is_pooled", None) is not False
        self.dependency: str | None = None
        self.index, self.own_kernel = -1, ""
        vars(self).update(further)

    def __repr__(self) -> str:
        kinds = f"{self.sharding_type!r}, {self.compute_kernel!r}"
        return f"ShardingOption({self.fqn!r}, {kinds}, {self.num_shards} shards)"

    def __hash__(self) -> int:
        return hash((self.fqn, self.sharding_type, self.compute_kernel, tuple(self.shards)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingOption) and hash(self) == hash(other)

    @property
    def path(self) -> str:
        """Path of the module."""
        return self.module[0]

    @property
    def fqn(self) -> str:
        """Path of the module and name of the table, with a dot between."""
        return f"{self.path}.{self.name}"

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """Number of features."""
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        """Memory of all shards."""
        return sum((shard.storage for shard in self.shards if shard.storage), Storage(0, 0))

    @property
    def total_perf(self) -> float:
        """Time of all shards, ms."""
        return sum(shard.perf.total for shard in self.shards if shard.perf)

    @property
    def cache_load_factor(self) -> float | None:
        """Part of the rows that the cache on the device holds, if one was asked for."""
        params = getattr(self, "cache_params", None)
        return None if params is None else params.load_factor


class PartitionByType(Enum):
    """Rules for the places of an option's shards."""

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


class PlannerErrorType(Enum):
    """Reasons why there is no plan."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"


class PlannerError(sw.NoPlanError):
    """There is no plan, or a partitioner found no room.

    Args:
        message: the text.
        error_type: the reason.
    """

    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        super().__init__(message)
        self.error_type = error_type


@contextmanager
def as_planner_error(error_type: Callable[[], PlannerErrorType]) -> Iterator[None]:
    """Raise a `PlannerError` for a `NoPlanError` of shardwright's.

    Args:
        error_type: gives the reason; asked if there is an error.
    """
    try:
        yield
    except PlannerError:
        raise
    except sw.NoPlanError as error:
        raise PlannerError(str(error), error_type()) from error


@dataclass
class PlanDebugStats:
    """Facts about a planner, for logs."""

    planner_type: str
    timeout_seconds: int | None


class PerfModel(ABC):
    """Rating of plans."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """The time of a placed plan, ms."""


class ShardEstimator(ABC):
    """Estimator of shards' times or memory.

    Args:
        topology: the ranks.
        constraints: constraints by table name.
    """

    @abstractmethod
    def __init__(
        self, topology: sw.Topology, constraints: dict[str, sw.ParameterConstraints] | None = None
    ) -> None: ...

    @abstractmethod
    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Mapping[str, Any] | None = None
    ) -> None:
        """Set `perf` or `storage` of each shard of the options."""


class Enumerator(ABC):
    """Lister of options."""

    @abstractmethod
    def __init__(
        self,
        topology: sw.Topology,
        batch_size: int = BATCH_SIZE,
        constraints: dict[str, sw.ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None: ...

    @abstractmethod
    def enumerate(self, module: Any, sharders: list[sw.ModuleSharder]) -> list[ShardingOption]:
        """The options of all tables of a model."""

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set `perf` and `storage` of each shard of the options."""


class Proposer(ABC):
    """Search for the options that a plan takes."""

    @abstractmethod
    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin a search among options of all tables."""

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """An option of each table; none at the end of the search."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: sw.Topology | None = None,
    ) -> None:
        """Learn what became of the last proposal.

        Args:
            partitionable: its shards fitted.
            plan: the placed proposal.
            perf_rating: its time, ms.
            storage_constraint: the ranks.
        """


class Partitioner(ABC):
    """Placement of shards on ranks."""

    @abstractmethod
    def partition(self, proposal: list[ShardingOption], storage_constraint: Any) -> list[ShardingOption]:
        """The proposal with the rank of each shard.

        Args:
            proposal: an option of each table.
            storage_constraint: the ranks; `devices` has the memory of each.

        Raises:
            PlannerError: a shard fits nowhere.
        """


class Stats(ABC):
    """Reporter of plans."""

    @abstractmethod
    def log(
        self,
        sharding_plan: sw.ShardingPlan,
        topology: sw.Topology,
        batch_size: int,
        storage_reservation: sw.StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, sw.ParameterConstraints] | None = None,
        sharders: Sequence[sw.ModuleSharder] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = False,
        debug_stats: PlanDebugStats | None = None,
    ) -> None:
        """Report a plan."""
