"""Enumeration: tables x sharding types x layouts x compute kernels, into columns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import attrs
import numpy as np
from attrs import frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.sharding_type import ShardingType
from shardwright.errors import PlanningError, UnknownNameError, UnknownPluginError
from shardwright.planning.conflicts import smallest_conflict
from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.layouts import Block, BlockRun, BlockRuns, Layout
from shardwright.planning.option_space import EVERYTHING, OptionSpace
from shardwright.planning.options import FREE, NO_GANG, Bools, Ints, Options, Refusal
from shardwright.planning.rank_rules import RankRules
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
    fold_tables: bool = True,
    space: OptionSpace = EVERYTHING,
    rules: RankRules | None = None,
) -> Options:
    """Every option of every table.

    Args:
        tables: what is to be sharded.
        topology: over what.
        constraints: what the user asks.
        plugins: where sharding types and kernels come from.
        batch_size: samples per rank and step, where the constraints give none.
        here: plan for this machine, so what is installed here counts.
        fold_tables: tables that the sharding types in use cannot tell apart stand once; otherwise each is distinct.
        space: what is offered to tables of which the constraints ask nothing.
        rules: which ranks tables may use, which are kept together and apart.

    Raises:
        UnknownNameError: the constraints name a table, type or kernel that does not exist.
        PlanningError: nothing is left for some table; the text has the reason of every refusal.
    """
    constraints.check(tables)
    catalogue = _Catalogue(plugins, topology, here, space)
    collected = _Columns()
    for index, table in enumerate(tables):
        rule = catalogue.filled(constraints.of(table))
        try:
            spec = _as_constrained(table, rule)
            _check_device(spec, rule, topology)
            key = catalogue.identity(spec, rule) if fold_tables else table.path
            if collected.add_table(spec, key):
                collected.add_lookups(*_lookups(spec, rule, batch_size))
                _enumerate_table(collected, catalogue, _Asked(rule, rules, index))
        except UnknownPluginError as error:
            raise UnknownPluginError(f"constraints for table {table.describe()}: {error}") from error
    return collected.finish(catalogue)


def _as_constrained(table: TableSpec, rule: ParameterConstraints) -> TableSpec:
    changes: dict[str, Any] = {"is_weighted": rule.is_weighted, "cache": rule.cache_params}
    if rule.qcomms_config is not None:
        changes["qcomms_config"] = rule.qcomms_config.over(table.qcomms_config).resolved()
    given = {name: value for name, value in changes.items() if value is not None}
    return attrs.evolve(table, **given) if given else table


def _check_device(table: TableSpec, rule: ParameterConstraints, topology: Topology) -> None:
    if rule.device_group not in (None, topology.compute_device):
        raise PlanningError(
            f"table {table.describe()} is constrained to device_group {rule.device_group!r}, but the "
            f"topology's compute_device is {topology.compute_device!r}. Change one of them."
        )


def _lookups(table: TableSpec, rule: ParameterConstraints, batch_size: int) -> tuple[float, float]:
    """Ids that a rank looks up in a table in a step, and vectors that it gets back."""
    pooling = np.array(rule.per_feature("pooling_factors", table, 1.0))
    bags = np.array(rule.per_feature("num_poolings", table, 1.0))
    bags = bags * np.array(rule.per_feature("batch_sizes", table, batch_size))
    # An empty bag needs no vector: fewer than one id per bag, fewer vectors than bags (as in TorchRec).
    pooled = table.pooling.value != "NONE"
    vectors = (np.minimum(1.0, pooling) if pooled else pooling) * bags
    return float((pooling * bags).sum()), float(vectors.sum())


@frozen
class _Asked:
    """What is asked of a table: its own constraints, and the rules on ranks that it shares with others."""

    rule: ParameterConstraints
    rules: RankRules | None
    index: int

    def refusal(self, layout: Layout) -> str:
        """Why the rules on ranks forbid a layout; empty if they do not."""
        return self.rules.refusal(self.index, layout) if self.rules else ""

    @property
    def demands(self) -> tuple[str, ...]:
        """The constraints that leave options out."""
        cutting = ("sharding_types", "compute_kernels", "min_partition", "ranks", "together", "apart")
        return tuple(name for name in cutting if name in self.rule.given)

    def only(self, demands: Sequence[str]) -> _Asked:
        """These demands alone."""
        dropped = set(self.demands) - set(demands)
        rules = self.rules.without(self.index, dropped) if self.rules else None
        return _Asked(self.rule.only(set(self.rule.given) - dropped), rules, self.index)


def _enumerate_table(collected: _Columns, catalogue: _Catalogue, asked: _Asked) -> None:
    table = collected.tables[-1]
    refusals: list[Refusal] = []
    found = list(_offered(catalogue, table, asked, refusals))
    unique = tuple(dict.fromkeys(refusals))
    if not found:
        raise PlanningError(_no_option(table, asked, unique, catalogue))
    for option in found:
        collected.add_option(*option)
    collected.refused.append(unique)


def _offered(
    catalogue: _Catalogue, table: TableSpec, asked: _Asked, refusals: list[Refusal]
) -> Iterator[tuple[int, int, Layout, _Shape, list[int]]]:
    """The options of a table: codes of type and kernel, the layout, and what the kernel is asked for each run."""
    for code in catalogue.types_for(asked.rule):
        kernels = catalogue.kernels_for(code, table, asked.rule, refusals)
        for layout, shape in catalogue.layouts(code, table, asked.rule, refusals):
            reason = asked.refusal(layout)
            if reason:
                name = list(catalogue.types)[code]
                refusals.append(Refusal(table.path, "sharding type", name, reason))
                continue
            for kernel in kernels:
                if not catalogue.goes_with(kernel, layout, table, refusals):
                    continue
                requests = catalogue.requests(kernel, table, shape, refusals)
                if requests is not None:
                    yield code, kernel, layout, shape, requests


def _smallest_conflict(catalogue: _Catalogue, table: TableSpec, asked: _Asked) -> str:
    """The fewest constraints that leave no option together, as a sentence; empty if none are to blame."""
    conflict = smallest_conflict(
        asked.demands,
        lambda demands: any(True for _ in _offered(catalogue, table, asked.only(demands), [])),
    )
    if not conflict:
        return ""
    values = ", ".join(f"{name}={asked.rule.to_data()[name]!r}" for name in conflict)
    if len(conflict) == 1:
        return f"{values} alone leaves none. "
    return f"{values} contradict each other: together they leave none, without any one of them some. "


def _no_option(table: TableSpec, asked: _Asked, refusals: Iterable[Refusal], catalogue: _Catalogue) -> str:
    given = asked.rule.to_data()
    constraints = ", ".join(f"{name}={given[name]}" for name in asked.demands)
    reasons = "; ".join(map(str, refusals)) or "no sharding type and no compute kernel is loaded"
    return (
        f"no option is left for table {table.describe()} on {catalogue.topology.world_size} ranks of device "
        f"{catalogue.topology.compute_device!r}, optimizer {table.optimizer or 'none (visible gradients)'}, "
        f"constraints: {constraints or 'none'}. {_smallest_conflict(catalogue, table, asked)}Refused: {reasons}. "
        f"Known sharding types: {', '.join(catalogue.plugins.sharding_types.names) or 'none'}; "
        f"compute kernels: {', '.join(catalogue.plugins.compute_kernels.names) or 'none'}. "
        + (f"Loosen constraints[{table.name!r}], or change" if asked.demands else "Change")
        + " what the refusals name."
    )


@frozen(eq=False)
class _Shape:
    """A layout's blocks as columns over runs of equal ones."""

    num_rows: tuple[int, ...]
    num_columns: tuple[int, ...]
    rank: tuple[int, ...]
    gang: tuple[int, ...]
    local_rank: tuple[int, ...]
    count: tuple[int, ...]
    is_copy: tuple[bool, ...]
    id_fraction: tuple[float, ...]
    num_gangs: int

    @classmethod
    def of(cls, layout: Layout) -> _Shape:
        runs = list(_runs(layout))
        labels = sorted({run.host_group for run in runs if run.host_group is not None})
        gangs: dict[int | None, int] = {None: NO_GANG, **{label: gang for gang, label in enumerate(labels)}}
        return cls(
            num_rows=tuple(run.num_rows for run in runs),
            num_columns=tuple(run.num_columns for run in runs),
            rank=tuple(run.rank for run in runs),
            gang=tuple(gangs[run.host_group] for run in runs),
            local_rank=tuple(run.local_rank for run in runs),
            count=tuple(run.length for run in runs),
            is_copy=tuple(run.is_copy for run in runs),
            id_fraction=tuple(run.id_fraction for run in runs),
            num_gangs=len(labels),
        )

    @property
    def last_rank(self) -> int:
        """The highest rank that a block must live on, or ``FREE``."""
        return max(
            FREE if first == FREE else first + count - 1
            for first, count in zip(self.rank, self.count, strict=True)
        )

    @property
    def last_local_rank(self) -> int:
        """The highest rank inside a host that a block must have, or ``FREE``."""
        return max(
            FREE if first == FREE else first + count - 1
            for first, count in zip(self.local_rank, self.count, strict=True)
        )


class _Run(NamedTuple):
    """Neighbouring blocks of one size that are placed alike."""

    num_rows: int
    num_columns: int
    host_group: int | None
    is_copy: bool
    id_fraction: float
    rank: int
    local_rank: int
    length: int

    def continues(self, other: _Run) -> bool:
        """Whether ``other`` begins where this ends and is of its kind."""
        return (
            self[:5] == other[:5]
            and other.rank == (FREE if self.rank == FREE else self.rank + self.length)
            and other.local_rank == (FREE if self.local_rank == FREE else self.local_rank + self.length)
        )


def _number(value: int | None, offset: int = 0) -> int:
    return FREE if value is None else value + offset


def _runs(layout: Layout) -> Iterator[_Run]:
    """The blocks of a layout as runs."""
    if isinstance(layout.blocks, BlockRuns):
        return _fold(chain.from_iterable(_parts(layout, run) for run in layout.blocks.runs))
    return _fold(_single(layout, block) for block in layout.blocks)


def _single(layout: Layout, block: Block) -> _Run:
    return _Run(
        block.num_rows,
        block.num_columns,
        block.host_group,
        layout.dataflow_of(block).is_replicated,
        layout.row_map.id_fraction_of(block.rows.index),
        _number(block.rank),
        _number(block.local_rank),
        1,
    )


def _parts(layout: Layout, run: BlockRun) -> Iterator[_Run]:
    """A run of blocks in pieces of equally many rows; what is known of one's ids is known of all."""
    is_copy = (run.dataflow or layout.dataflow).is_replicated
    for start, rows, count in run.sizes():
        yield _Run(
            rows,
            len(run.columns),
            run.host_group,
            is_copy,
            run.row_map.id_fraction_of(run.first_part + (0 if run.is_copied else start)),
            _number(run.rank, start),
            _number(run.local_rank, start),
            count,
        )


def _fold(runs: Iterable[_Run]) -> Iterator[_Run]:
    """The runs, those joined that continue the one before."""
    last: _Run | None = None
    for run in runs:
        if last is not None and last.continues(run):
            last = last._replace(length=last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


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
                return cls(reason=_reason(answer))
            offered = tuple(kind.layouts(table, topology, rule))
            if strange := next((one for one in offered if not isinstance(one, Layout)), None):
                raise TypeError(f"layouts() must give Layouts, it gave a {type(strange).__name__}")
            layouts = tuple((layout, _Shape.of(layout)) for layout in offered)
        except Exception as error:
            # A plugin's code: whatever it raises, the user must learn whose it is.
            raise PlanningError(
                f"sharding type {kind.name!r} failed for table {table.describe()}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for layout, shape in layouts:
            for rank, count, of in (
                (shape.last_rank, topology.world_size, "ranks"),
                (shape.last_local_rank, topology.local_world_size, "ranks of a host"),
            ):
                if rank >= count:
                    raise PlanningError(
                        f"sharding type {kind.name!r} broke its contract: a block of its layout {layout.variant!r} "
                        f"of table {table.describe()} is on rank {rank} of {count} {of}"
                    )
        return cls(layouts, "" if layouts else "offers no layout for this table")


def _reason(answer: object) -> str:
    """What `supports` gave for a reason."""
    if isinstance(answer, str):
        return answer
    return f"supports() returned {answer!r}; it must be True, or a text that says why not"


_SHAPE_OF: Callable[[TableSpec], tuple[Any, ...]] = attrgetter(
    *(a.name for a in attrs.fields(TableSpec) if a.name not in ("name", "module", "feature_names"))
)


def _alike(table: TableSpec) -> tuple[Any, ...]:
    """All of a table but its name, its module and its features: tables with equal answers are alike."""
    return _SHAPE_OF(table)


class _Catalogue:
    """The sharding types and kernels in use, with codes, and what they answered."""

    def __init__(self, plugins: Plugins, topology: Topology, here: bool, space: OptionSpace) -> None:
        self.plugins = plugins
        self.topology = topology
        self.here = here
        self.space = space
        self.types: dict[str, ShardingType] = {}
        self.kernels: dict[str, ComputeKernel] = {}
        self.request_codes: dict[tuple[int, KernelRequest], int] = {}
        self._answers: dict[tuple[int, KernelRequest], str] = {}
        self._offers: dict[Any, _Offer] = {}
        self._rules: dict[ParameterConstraints, ParameterConstraints] = {}
        self._type_codes: dict[tuple[str, ...] | None, list[int]] = {}

    def filled(self, rule: ParameterConstraints) -> ParameterConstraints:
        """What is asked of a table, with the defaults of what is offered; one object for all that are equal."""
        if rule not in self._rules:
            self._rules[rule] = self.space.fill(rule)
        return self._rules[rule]

    def identity(self, table: TableSpec, rule: ParameterConstraints) -> Hashable:
        """What a table is to all that plans it; equal for tables that are alike."""
        codes = self.types_for(rule)
        types = list(self.types.values())
        if not all(types[code].answers_by_shape for code in codes):
            return table.path
        return (*_alike(table), table.num_features, rule)

    def types_for(self, rule: ParameterConstraints) -> list[int]:
        """Codes of the sharding types that ``rule`` allows, in the order of names or of the constraint."""
        asked = rule.sharding_types
        if asked not in self._type_codes:
            codes = self._codes(self.plugins.sharding_types, self.types, asked)
            names = list(self.types)
            self._type_codes[asked] = [code for code in codes if self.space.has(names[code], rule)]
        return self._type_codes[asked]

    def kernels_for(
        self, code: int, table: TableSpec, rule: ParameterConstraints, refusals: list[Refusal]
    ) -> list[int]:
        """Codes of the kernels that may serve ``table`` with a sharding type, the preferred first.

        Kernels that show gradients are for tables without an optimizer, or for those who name them.
        """
        asked = rule.compute_kernels or self.space.kernels_of(list(self.types)[code], rule)
        codes = self._codes(self.plugins.compute_kernels, self.kernels, asked)
        if asked is not None:
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

    def goes_with(self, kernel: int, layout: Layout, table: TableSpec, refusals: list[Refusal]) -> bool:
        """Whether a kernel takes such ids as a layout sends; else there is one more refusal."""
        own = list(self.kernels.values())[kernel]
        reason = own.refusal_of_ids(layout.row_map)
        if reason:
            refusals.append(Refusal(table.path, "compute kernel", own.name, reason))
        return not reason

    def requests(
        self, kernel: int, table: TableSpec, shape: _Shape, refusals: list[Refusal]
    ) -> list[int] | None:
        """The request code of each run, or ``None`` if the kernel refuses one of them."""
        codes: dict[int, int] = {}
        for width in dict.fromkeys(shape.num_columns):
            request = self._request(table, width)
            reason = self._ask(kernel, request)
            if reason:
                name = list(self.kernels)[kernel]
                refusals.append(Refusal(table.path, "compute kernel", name, reason))
                return None
            codes[width] = self.request_codes.setdefault((kernel, request), len(self.request_codes))
        return [codes[width] for width in shape.num_columns]

    def _request(self, table: TableSpec, width: int) -> KernelRequest:
        return KernelRequest.of(table, width, device=self.topology.compute_device, here=self.here)

    def _ask(self, code: int, request: KernelRequest) -> str:
        key = (code, request)
        if key not in self._answers:
            kernel = list(self.kernels.values())[code]
            answer = kernel.supports(request)
            self._answers[key] = self._missing_tier(kernel, request) if answer is True else _reason(answer)
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
        self.refused: list[tuple[Refusal, ...]] = []
        self.option_table: list[int] = []
        self._all_tables: list[TableSpec] = []
        self._alike: list[int] = []
        self._known: dict[Hashable, int] = {}
        self._ids: list[float] = []
        self._bags: list[float] = []
        self._types: list[int] = []
        self._kernels: list[int] = []
        self._layouts: list[Layout] = []
        self._shapes: list[_Shape] = []
        self._requests: list[list[int]] = []

    def add_table(self, table: TableSpec, key: Hashable) -> bool:
        """Add a table; whether it is like none before it."""
        is_new = key not in self._known
        if is_new:
            self._known[key] = len(self.tables)
            self.tables.append(table)
        self._all_tables.append(table)
        self._alike.append(self._known[key])
        return is_new

    def add_lookups(self, ids: float, bags: float) -> None:
        self._ids.append(ids)
        self._bags.append(bags)

    def add_option(self, kind: int, kernel: int, layout: Layout, shape: _Shape, requests: list[int]) -> None:
        self.option_table.append(len(self.tables) - 1)
        self._types.append(kind)
        self._kernels.append(kernel)
        self._layouts.append(layout)
        self._shapes.append(shape)
        self._requests.append(requests)

    def finish(self, catalogue: _Catalogue) -> Options:
        counts = np.array([len(shape.rank) for shape in self._shapes], dtype=np.int64)
        table = np.array(self.option_table, dtype=np.int64)
        rank, gang, local_rank = self._places(catalogue.topology)
        return Options(
            tables=tuple(self.tables),
            all_tables=tuple(self._all_tables),
            alike=np.array(self._alike, dtype=np.int64),
            sharding_types=tuple(catalogue.types.values()),
            compute_kernels=tuple(catalogue.kernels.values()),
            requests=tuple(catalogue.request_codes),
            refused=tuple(self.refused),
            ids_per_batch=np.array(self._ids),
            bags_per_batch=np.array(self._bags),
            first_option=np.searchsorted(table, np.arange(len(self.tables) + 1)).astype(np.int64),
            table=table,
            sharding_type=np.array(self._types, dtype=np.int64),
            compute_kernel=np.array(self._kernels, dtype=np.int64),
            layouts=tuple(self._layouts),
            cuts_rows=self._of_layouts(lambda layout: layout.cuts_rows),
            is_replicated=self._of_layouts(lambda layout: layout.is_replicated),
            sums_inside_host=self._of_layouts(
                lambda layout: any(dataflow.sums_inside_host for dataflow in layout.dataflows)
            ),
            first_shard=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            option=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
            count=self._joined(attrgetter("count")),
            num_rows=self._joined(attrgetter("num_rows")),
            num_columns=self._joined(attrgetter("num_columns")),
            is_copy=np.array(list(chain.from_iterable(shape.is_copy for shape in self._shapes)), dtype=bool),
            id_fraction=np.array(
                list(chain.from_iterable(shape.id_fraction for shape in self._shapes)), dtype=np.float64
            ),
            rank=rank,
            gang=gang,
            local_rank=local_rank,
            request=np.array(list(chain.from_iterable(self._requests)), dtype=np.int64),
        )

    def _of_layouts(self, property_of: Callable[[Layout], bool]) -> Bools:
        return np.array([property_of(layout) for layout in self._layouts], dtype=bool)

    def _joined(self, column_of: Callable[[_Shape], tuple[int, ...]]) -> Ints:
        return np.array(list(chain.from_iterable(map(column_of, self._shapes))), dtype=np.int64)

    def _places(self, topology: Topology) -> tuple[Ints, Ints, Ints]:
        """Rank, gang and rank in the host of each run; on one host that rank is the rank, and there are no gangs."""
        rank, local_rank = self._joined(attrgetter("rank")), self._joined(attrgetter("local_rank"))
        if topology.num_hosts > 1:
            return rank, self._gangs(), local_rank
        rank = np.where(local_rank == FREE, rank, local_rank)
        return rank, np.full_like(rank, NO_GANG), np.full_like(rank, FREE)

    def _gangs(self) -> Ints:
        """The gangs of each option, with numbers that no other has."""
        gangs = self._joined(attrgetter("gang"))
        counts = np.array([shape.num_gangs for shape in self._shapes], dtype=np.int64)
        before = np.repeat(np.cumsum(counts) - counts, [len(shape.rank) for shape in self._shapes])
        return np.where(gangs == NO_GANG, NO_GANG, gangs + before)
