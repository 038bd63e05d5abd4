"""Enumeration: tables x sharding types x layouts x compute kernels, into columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
from attrs import frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import PlanningError, UnknownNameError, UnknownPluginError
from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.layouts import Layout
from shardwright.planning.options import FREE, NO_GANG, Ints, Options, Refusal
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology

if TYPE_CHECKING:
    from shardwright.registry import Registry


class Plugins(Protocol):
    """The registries that planning asks; the plugin host is one of these."""

    @property
    def sharding_types(self) -> Registry[ShardingType]:
        """By name or alias."""

    @property
    def compute_kernels(self) -> Registry[ComputeKernel]:
        """By name or alias."""


def enumerate_options(
    tables: Sequence[TableSpec],
    topology: Topology,
    constraints: Constraints,
    plugins: Plugins,
    *,
    batch_size: int,
    here: bool = False,
) -> Options:
    """Every option of every table.

    Args:
        tables: what is to be sharded.
        topology: over what.
        constraints: what the user asks.
        plugins: where sharding types and kernels come from.
        batch_size: samples per rank and step, where the constraints give none.
        here: plan for this machine, so what is installed here counts.

    Raises:
        UnknownNameError: the constraints name a table, type or kernel that does not exist.
        PlanningError: nothing is left for some table; the text has the reason of every refusal.
    """
    constraints.check(tables)
    catalogue = _Catalogue(plugins, topology, here)
    collected = _Columns()
    for table in tables:
        rule = constraints.of(table)
        try:
            collected.add_table(_as_constrained(table, rule), rule, batch_size)
            _enumerate_table(collected, catalogue, rule)
        except UnknownPluginError as error:
            raise UnknownPluginError(f"constraints for table {table.describe()}: {error}") from error
    return collected.finish(catalogue)


def _as_constrained(table: TableSpec, rule: ParameterConstraints) -> TableSpec:
    changes: dict[str, Any] = {}
    if rule.is_weighted is not None:
        changes["is_weighted"] = rule.is_weighted
    if rule.qcomms_config is not None:
        changes["qcomms_config"] = rule.qcomms_config.over(table.qcomms_config).resolved()
    return attrs.evolve(table, **changes) if changes else table


def _enumerate_table(collected: _Columns, catalogue: _Catalogue, rule: ParameterConstraints) -> None:
    table = collected.tables[-1]
    refusals: list[Refusal] = []
    if rule.device_group not in (None, catalogue.topology.compute_device):
        raise PlanningError(
            f"table {table.describe()} is constrained to device_group {rule.device_group!r}, but the "
            f"topology's compute_device is {catalogue.topology.compute_device!r}. Change one of them."
        )
    kernels = catalogue.kernels_for(table, rule, refusals)
    before = len(collected.option_table)
    for code in catalogue.types_for(rule):
        for layout, shape in catalogue.layouts(code, table, rule, refusals):
            for kernel in kernels:
                requests = catalogue.requests(kernel, table, shape, refusals)
                if requests is not None:
                    collected.add_option(code, kernel, layout, shape, requests)
    unique = tuple(dict.fromkeys(refusals))
    if len(collected.option_table) == before:
        raise PlanningError(_no_option(table, rule, unique, catalogue))
    collected.refusals.extend(unique)


def _no_option(
    table: TableSpec, rule: ParameterConstraints, refusals: Iterable[Refusal], catalogue: _Catalogue
) -> str:
    asked = ", ".join(
        f"{name}={list(values)}"
        for name, values in (
            ("sharding_types", rule.sharding_types),
            ("compute_kernels", rule.compute_kernels),
        )
        if values
    )
    reasons = "; ".join(map(str, refusals)) or "no sharding type and no compute kernel is loaded"
    return (
        f"no option is left for table {table.describe()} on {catalogue.topology.world_size} ranks of device "
        f"{catalogue.topology.compute_device!r}, optimizer {table.optimizer or 'none (visible gradients)'}, "
        f"constraints: {asked or 'none'}. Refused: {reasons}. "
        f"Known sharding types: {', '.join(catalogue.plugins.sharding_types.names) or 'none'}; "
        f"compute kernels: {', '.join(catalogue.plugins.compute_kernels.names) or 'none'}. "
        + (f"Loosen constraints[{table.name!r}], or change" if asked else "Change")
        + " what the refusals name."
    )


@frozen(eq=False)
class _Shape:
    """A layout's blocks as columns."""

    num_rows: Ints
    num_columns: Ints
    rank: Ints
    gang: Ints
    num_gangs: int
    local_rank: Ints
    widths: Ints
    width: Ints

    @classmethod
    def of(cls, layout: Layout) -> _Shape:
        row_map = layout.row_map
        rows = np.array([row_map.num_rows_of(part) for part in range(row_map.num_parts)], dtype=np.int64)
        parts = [block.rows.index for block in layout.blocks]
        columns = np.array([block.num_columns for block in layout.blocks], dtype=np.int64)
        labels = sorted({block.host_group for block in layout.blocks if block.host_group is not None})
        gangs: dict[int | None, int] = {None: NO_GANG, **{label: gang for gang, label in enumerate(labels)}}
        widths, width = np.unique(columns, return_inverse=True)
        return cls(
            num_rows=rows[parts],
            num_columns=columns,
            rank=_numbers([block.rank for block in layout.blocks]),
            gang=np.array([gangs[block.host_group] for block in layout.blocks], dtype=np.int64),
            num_gangs=len(labels),
            local_rank=_numbers([block.local_rank for block in layout.blocks]),
            widths=widths,
            width=width,
        )


def _numbers(values: Sequence[int | None]) -> Ints:
    return np.array([FREE if value is None else value for value in values], dtype=np.int64)


@frozen(eq=False)
class _Offer:
    """What a sharding type answered for a table: layouts, or the reason why there are none."""

    layouts: tuple[tuple[Layout, _Shape], ...] = ()
    reason: str = ""

    @classmethod
    def of(
        cls, kind: ShardingType, table: TableSpec, topology: Topology, rule: ParameterConstraints
    ) -> _Offer:
        try:
            answer = kind.supports(table, topology)
            if answer is not True:
                return cls(reason=str(answer))
            layouts = tuple((layout, _Shape.of(layout)) for layout in kind.layouts(table, topology, rule))
        except Exception as error:
            # A plugin's code: whatever it raises, the user must learn whose it is.
            raise PlanningError(
                f"sharding type {kind.name!r} failed for table {table.describe()}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for layout, shape in layouts:
            for rank, count, of in (
                (shape.rank.max(), topology.world_size, "ranks"),
                (shape.local_rank.max(), topology.local_world_size, "ranks of a host"),
            ):
                if rank >= count:
                    raise PlanningError(
                        f"sharding type {kind.name!r} broke its contract: a block of its layout {layout.variant!r} "
                        f"of table {table.describe()} is on rank {rank} of {count} {of}"
                    )
        return cls(layouts, "" if layouts else "offers no layout for this table")


def _alike(table: TableSpec) -> tuple[Any, ...]:
    """What tables have in common for which a sharding type that answers by shape is asked once."""
    shape = (table.num_embeddings, table.embedding_dim, table.data_type)
    return (*shape, table.pooling, table.is_weighted, table.optimizer, table.qcomms_config)


class _Catalogue:
    """The sharding types and kernels in use, with codes, and what they answered."""

    def __init__(self, plugins: Plugins, topology: Topology, here: bool) -> None:
        self.plugins = plugins
        self.topology = topology
        self.here = here
        self.types: dict[str, ShardingType] = {}
        self.kernels: dict[str, ComputeKernel] = {}
        self.request_codes: dict[tuple[int, KernelRequest], int] = {}
        self._answers: dict[tuple[int, KernelRequest], str] = {}
        self._offers: dict[Any, _Offer] = {}

    def types_for(self, rule: ParameterConstraints) -> list[int]:
        """Codes of the sharding types that ``rule`` allows, in the order of names or of the constraint."""
        return self._codes(self.plugins.sharding_types, self.types, rule.sharding_types)

    def kernels_for(self, table: TableSpec, rule: ParameterConstraints, refusals: list[Refusal]) -> list[int]:
        """Codes of the kernels that may serve ``table``, the preferred first.

        Kernels that show gradients are for tables without an optimizer, or for those who name them.
        """
        codes = self._codes(self.plugins.compute_kernels, self.kernels, rule.compute_kernels)
        if rule.compute_kernels is not None:
            return codes
        kernels = list(self.kernels.values())
        codes.sort(key=lambda code: (-kernels[code].preference, kernels[code].name))
        kept = [code for code in codes if kernels[code].fuses_optimizer or table.optimizer is None]
        for code in codes:
            if code not in kept:
                reason = "applies no optimizer in the backward pass, and is taken only when asked for by name"
                refusals.append(Refusal(table.path, "compute kernel", kernels[code].name, reason))
        return kept

    def layouts(
        self, code: int, table: TableSpec, rule: ParameterConstraints, refusals: list[Refusal]
    ) -> Sequence[tuple[Layout, _Shape]]:
        """What a sharding type offers for ``table``; a refusal if that is nothing."""
        kind = list(self.types.values())[code]
        key = (code, _alike(table), rule.sharding_types, rule.min_partition)
        offer = self._offers.get(key) if kind.answers_by_shape else None
        if offer is None:
            offer = self._offers[key] = _Offer.of(kind, table, self.topology, rule)
        if offer.reason:
            refusals.append(Refusal(table.path, "sharding type", kind.name, offer.reason))
        return offer.layouts

    def requests(self, kernel: int, table: TableSpec, shape: _Shape, refusals: list[Refusal]) -> Ints | None:
        """The request code of each block, or ``None`` if the kernel refuses one of them."""
        codes = []
        for width in shape.widths.tolist():
            request = KernelRequest.of(table, width, device=self.topology.compute_device, here=self.here)
            reason = self._ask(kernel, request)
            if reason:
                name = list(self.kernels)[kernel]
                refusals.append(Refusal(table.path, "compute kernel", name, reason))
                return None
            codes.append(self.request_codes.setdefault((kernel, request), len(self.request_codes)))
        return np.array(codes, dtype=np.int64)[shape.width]

    def _ask(self, code: int, request: KernelRequest) -> str:
        key = (code, request)
        if key not in self._answers:
            kernel = list(self.kernels.values())[code]
            answer = kernel.supports(request)
            self._answers[key] = self._missing_tier(kernel, request) if answer is True else str(answer)
        return self._answers[key]

    def _missing_tier(self, kernel: ComputeKernel, request: KernelRequest) -> str:
        try:
            for tier in kernel.memory_bytes(request, 1):
                self.topology.tier_of(tier)
        except UnknownNameError as error:
            return str(error)
        return ""

    def _codes(
        self, registry: Registry[Any], known: dict[str, Any], asked: Sequence[str] | None
    ) -> list[int]:
        names = list(registry) if asked is None else [registry.entry(name).name for name in asked]
        for name in names:
            if name not in known:
                known[name] = registry.create(name)
        positions = {name: code for code, name in enumerate(known)}
        return [positions[name] for name in dict.fromkeys(names)]


class _Columns:
    """Columns while they grow."""

    def __init__(self) -> None:
        self.tables: list[TableSpec] = []
        self.refusals: list[Refusal] = []
        self.option_table: list[int] = []
        self._ids: list[float] = []
        self._bags: list[float] = []
        self._types: list[int] = []
        self._kernels: list[int] = []
        self._layouts: list[Layout] = []
        self._shapes: list[_Shape] = []
        self._requests: list[Ints] = []

    def add_table(self, table: TableSpec, rule: ParameterConstraints, batch_size: int) -> None:
        pooling = np.array(rule.per_feature("pooling_factors", table, 1.0))
        bags = np.array(rule.per_feature("num_poolings", table, 1.0))
        bags = bags * np.array(rule.per_feature("batch_sizes", table, batch_size))
        self.tables.append(table)
        self._ids.append(float((pooling * bags).sum()))
        # An empty bag needs no vector: fewer than one id per bag, fewer vectors than bags (as in TorchRec).
        pooled = table.pooling.value != "NONE"
        self._bags.append(float(((np.minimum(1.0, pooling) if pooled else pooling) * bags).sum()))

    def add_option(self, kind: int, kernel: int, layout: Layout, shape: _Shape, requests: Ints) -> None:
        self.option_table.append(len(self.tables) - 1)
        self._types.append(kind)
        self._kernels.append(kernel)
        self._layouts.append(layout)
        self._shapes.append(shape)
        self._requests.append(requests)

    def finish(self, catalogue: _Catalogue) -> Options:
        counts = np.array([len(shape.rank) for shape in self._shapes], dtype=np.int64)
        table = np.array(self.option_table, dtype=np.int64)
        return Options(
            tables=tuple(self.tables),
            sharding_types=tuple(catalogue.types.values()),
            compute_kernels=tuple(catalogue.kernels.values()),
            requests=tuple(catalogue.request_codes),
            refusals=tuple(self.refusals),
            ids_per_batch=np.array(self._ids),
            bags_per_batch=np.array(self._bags),
            first_option=np.searchsorted(table, np.arange(len(self.tables) + 1)).astype(np.int64),
            table=table,
            sharding_type=np.array(self._types, dtype=np.int64),
            compute_kernel=np.array(self._kernels, dtype=np.int64),
            layouts=tuple(self._layouts),
            cuts_rows=np.array([layout.cuts_rows for layout in self._layouts], dtype=bool),
            is_replicated=np.array([layout.dataflow.is_replicated for layout in self._layouts], dtype=bool),
            sums_inside_host=np.array(
                [layout.dataflow.sums_inside_host for layout in self._layouts], dtype=bool
            ),
            first_shard=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            option=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            num_rows=_joined([shape.num_rows for shape in self._shapes]),
            num_columns=_joined([shape.num_columns for shape in self._shapes]),
            rank=_joined([shape.rank for shape in self._shapes]),
            gang=_joined(self._gangs()),
            local_rank=_joined([shape.local_rank for shape in self._shapes]),
            request=_joined(self._requests),
        )

    def _gangs(self) -> list[Ints]:
        """The gangs of each option, with numbers that no other has."""
        gangs, first = [], 0
        for shape in self._shapes:
            gangs.append(np.where(shape.gang == NO_GANG, NO_GANG, shape.gang + first))
            first += shape.num_gangs
        return gangs


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])
