"""Enumeration: tables x sharding types x layouts x compute kernels, into columns, with their costs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from shardwright.contracts.demands import refusal_of_sums
from shardwright.errors import NoPlanError, PlanningError, UnknownPluginError
from shardwright.planning.arrays import FREE, NO_GANG, Ints
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.offers import Offers
from shardwright.planning.options.options import TYPE, Options, Refusal
from shardwright.planning.options.planning_plugins import PlanningPlugins
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.options.search_space import SearchSpace, estimate_costs
from shardwright.planning.options.shapes import Runs, ShardRun
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.option_space import EVERYTHING, OptionSpace
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import count_text
from shardwright.planning.watch import OutOfTime, Watch

if TYPE_CHECKING:
    from shardwright.host.plugin_host import PluginHost

_Option: TypeAlias = tuple[str, str, Layout, Runs, list[int]]
"""Names of a sharding type and a kernel, a layout, its runs, and the code of what the kernel is asked for each run."""

_Refuses: TypeAlias = Callable[[Layout], str]
"""Explains why the rules on ranks forbid a table's layout; empty if they do not."""


@frozen(eq=False)
class _TableOptions:
    """A distinct table with its options.

    Args:
        table: the table.
        lookups: ids that a rank looks up in it in a step, and vectors that it gets back.
        options: its options.
        refused: sharding types and kernels that were refused for it.
    """

    table: TableSpec
    lookups: tuple[float, float]
    options: list[_Option]
    refused: tuple[Refusal, ...]


def prepare(
    tables: Sequence[TableSpec],
    request: Request,
    plugins: PlanningPlugins,
    *,
    watch: Watch | None = None,
) -> SearchSpace:
    """Ask sharding types and kernels for options, and the estimators for their costs.

    Args:
        tables: tables to shard.
        request: over what, and what the user asks.
        plugins: the plugins that plan.
        watch: watch of the search to come; ends this too.

    Raises:
        KeyboardInterrupt: somebody asked for an end before the options were known.
        PlanningError: nothing is left for some table, or an estimator broke its contract.
        NoPlanError: constraints contradict each other.
        UnknownNameError: the constraints name a table, type or kernel that does not exist.
    """
    rules = RankRules.of(request.constraints, tables, request.topology)
    options = enumerate_options(
        tables,
        request.topology,
        request.constraints,
        plugins.plugin_host,
        batch_size=request.batch_size,
        on_this_machine=request.on_this_machine,
        fold_tables=plugins.performance.depends_on_shape_only and plugins.storage.depends_on_shape_only,
        space=plugins.offered_space(request.topology),
        rules=rules,
        watch=watch,
    )
    ids_per_batch = float(options.ids_per_batch @ options.multiplicity)
    capacity = request.reservation.capacity_bytes(request.topology, ids_per_batch)
    return estimate_costs(
        options,
        request.topology,
        plugins.performance,
        plugins.storage,
        capacity,
        rules=rules,
        objective=request.objective,
    )


def enumerate_options(
    tables: Sequence[TableSpec],
    topology: Topology,
    constraints: Constraints,
    plugins: PluginHost,
    *,
    batch_size: int,
    on_this_machine: bool = False,
    fold_tables: bool = True,
    space: OptionSpace = EVERYTHING,
    rules: RankRules | None = None,
    watch: Watch | None = None,
) -> Options:
    """Every option of every table.

    Args:
        tables: tables to shard.
        topology: over what.
        constraints: demands of the user, by table.
        plugins: source of sharding types and kernels.
        batch_size: samples per rank and step, where the constraints give none.
        on_this_machine: plan for this machine, so what is installed here counts.
        fold_tables: tables that the sharding types in use cannot tell apart stand once; otherwise each is distinct.
        space: options offered to tables without constraints.
        rules: ranks that tables may use, and tables kept together or apart.
        watch: ends the work when it is over.

    Raises:
        NoPlanError: the time was over before all options were known.
        KeyboardInterrupt: somebody asked for an end before that.
        UnknownNameError: the constraints name a table, type or kernel that does not exist.
        PlanningError: nothing is left for some table; the text has the reason of every refusal.
    """
    constraints.check(tables)
    offers = Offers(plugins, topology, on_this_machine, space, watch or Watch())
    specs: list[TableSpec] = []
    alike: list[int] = []
    known: dict[Hashable, int] = {}
    found: list[_TableOptions] = []
    for index, table in enumerate(tables):
        rule = offers.asked(table, constraints.of(table))
        try:
            spec = rule.applied_to(table)
            _check_device(spec, rule, topology)
            key = offers.identity(spec, rule) if fold_tables else table.path
            alike.append(known.setdefault(key, len(found)))
            if alike[-1] == len(found):
                lookups = _lookups(spec, rule, batch_size)
                refuses: _Refuses = partial(rules.refusal, index) if rules else lambda layout: ""
                found.append(_table_options(spec, lookups, offers, rule, refuses))
            specs.append(spec)
        except UnknownPluginError as error:
            raise UnknownPluginError(
                f"what is asked of table {table.describe()}: {error}", **error.facts
            ) from error
        except OutOfTime:
            raise _ended_early(offers, table, index, len(tables)) from None
    return _as_columns(found, specs, alike, offers)


def _ended_early(offers: Offers, table: TableSpec, index: int, count: int) -> BaseException:
    """Make the error for an enumeration that ended before all options were known."""
    if offers.watch.was_interrupted:
        return KeyboardInterrupt()
    elapsed_s = offers.watch.elapsed_s
    part = advice = ""
    for name, seconds in offers.seconds.items():
        if seconds > elapsed_s / 2:
            part = f", of which sharding type {name!r} took {seconds:.1f} s"
            advice = (
                f", or leave {name!r} out of sharding_types. (A row map whose rows_of() lists rows is slow unless it "
                "has a formula for num_rows_of().)"
            )
    return NoPlanError(
        f"no plan found: of {count_text(count, 'table')}, the options of {index} were known when the time was over, "
        f"after {elapsed_s:.1f} s{part}; the next is {table.describe()}. Allow more time{advice}"
    )


def _check_device(table: TableSpec, rule: ParameterConstraints, topology: Topology) -> None:
    if rule.device_group not in (None, *topology.device_types):
        raise PlanningError(
            f"table {table.describe()} is constrained to device_group {rule.device_group!r}, but the "
            f"topology's compute_device is {_devices_text(topology)}. Change one of them."
        )


def _devices_text(topology: Topology) -> str:
    return " and ".join(map(repr, topology.device_types))


def _lookups(table: TableSpec, rule: ParameterConstraints, batch_size: int) -> tuple[float, float]:
    """Ids that a rank looks up in a table in a step, and vectors that it gets back."""
    pooling = np.array(rule.per_feature("pooling_factors", table, 1.0))
    bags = np.array(rule.per_feature("num_poolings", table, 1.0))
    bags = bags * np.array(rule.per_feature("batch_sizes", table, batch_size))
    # An empty bag needs no vector: fewer than one id per bag, fewer vectors than bags (as in TorchRec).
    pooled = table.pooling.value != "NONE"
    vectors = (np.minimum(1.0, pooling) if pooled else pooling) * bags
    return float((pooling * bags).sum()), float(vectors.sum())


def _cutting(rule: ParameterConstraints) -> tuple[str, ...]:
    """The constraints that leave options out."""
    cutting = (
        *("sharding_types", "compute_kernels", "cache_params", "min_partition"),
        *("ranks", "together", "apart"),
    )
    return tuple(name for name in cutting if name in rule.given)


def _table_options(
    table: TableSpec,
    lookups: tuple[float, float],
    offers: Offers,
    rule: ParameterConstraints,
    refuses: _Refuses,
) -> _TableOptions:
    refusals: list[Refusal] = []
    found = list(_offered(offers, table, rule, refuses, refusals))
    named = offers.names_asked(table, rule)
    unique = tuple(evolve(refusal, is_asked=refusal.name in named) for refusal in dict.fromkeys(refusals))
    if not found:
        optimizers, own = offers.plugins.optimizers, table.optimizer and table.optimizer.name
        if own and optimizers.names and own not in optimizers:
            optimizers.entry(own)  # which raises: no plugin has it, and no kernel took one of that name
        asked = (*_cutting(rule), *(demand.name for demand in offers.demands_on(table, rule)))
        raise PlanningError(
            _no_option(table, rule, unique, offers), subject=table.path, asked=tuple(dict.fromkeys(asked))
        )
    return _TableOptions(table, lookups, found, unique)


def _offered(
    offers: Offers, table: TableSpec, rule: ParameterConstraints, refuses: _Refuses, refusals: list[Refusal]
) -> Iterator[_Option]:
    """The options of a table: names of type and kernel, the layout, and what the kernel is asked for each run."""
    codec = table.qcomms_config.forward if table.qcomms_config else None
    for kind in offers.types_for(rule):
        kernels = offers.kernels_for(kind, table, rule, refusals)
        for layout, runs in offers.layouts(kind, table, rule, refusals):
            reason = refuses(layout) or refusal_of_sums(table, codec, cuts_rows=layout.cuts_rows)
            if reason:
                refusals.append(Refusal(table.path, TYPE, kind, reason))
                continue
            for kernel in kernels:
                if not offers.goes_with(kernel, layout, table, rule, refusals):
                    continue
                extras = {**(rule.extras or {}), **layout.extras}
                requests = offers.requests(kernel, table, runs, extras, refusals)
                if requests is not None:
                    yield kind, kernel, layout, runs, requests


def _no_option(
    table: TableSpec, rule: ParameterConstraints, refusals: Iterable[Refusal], offers: Offers
) -> str:
    given = rule.to_data()
    constraints = ", ".join(f"{name}={given[name]}" for name in _cutting(rule))
    told = "; ".join(str(refusal).rstrip(".") for refusal in refusals)
    kinds = (offers.plugins.sharding_types, offers.plugins.compute_kernels)
    missing = [f"no {registry.kind.title}" for registry in kinds if not registry.names]
    reasons = told or (f"{' and '.join(missing)} is loaded" if missing else "nothing is offered unasked")
    by_name = [] if rule.sharding_types else offers.types_by_name_only
    unasked = (
        f"Offered only to tables whose sharding_types name them: {', '.join(by_name)}. " if by_name else ""
    )
    return (
        f"no option is left for table {table.describe()} on "
        f"{count_text(offers.topology.world_size, 'rank')} of device "
        f"{_devices_text(offers.topology)}, optimizer {table.optimizer or 'none (visible gradients)'}, "
        f"constraints: {constraints or 'none'}. Refused: {reasons}. "
        f"{unasked}Known sharding types: {', '.join(offers.plugins.sharding_types.names) or 'none'}; "
        f"compute kernels: {', '.join(offers.plugins.compute_kernels.names) or 'none'}. "
        + (f"Loosen what is asked of {table.name!r}, or change" if _cutting(rule) else "Change")
        + " what the refusals name."
    )


def _as_columns(
    found: Sequence[_TableOptions], all_tables: Iterable[TableSpec], alike: Sequence[int], offers: Offers
) -> Options:
    """The options of all tables, as columns.

    Args:
        found: distinct tables, in order.
        all_tables: all tables.
        alike: the distinct table that each of them is like.
        offers: sharding types and kernels.
    """
    type_codes, kernel_codes = (
        {name: code for code, name in enumerate(known)} for known in (offers.types, offers.kernels)
    )
    types, kernels, layouts, of_options, requests = zip(
        *chain.from_iterable(own.options for own in found), strict=True
    )
    counts = np.array(list(map(len, of_options)), dtype=np.int64)
    num_options = [len(own.options) for own in found]
    ids, bags = np.array([own.lookups for own in found], dtype=np.float64).T.copy()
    runs = list(chain.from_iterable(of_options))
    rank, gang, local_rank = _places(runs, of_options, offers.topology)
    return Options(
        tables=tuple(own.table for own in found),
        all_tables=tuple(all_tables),
        distinct_table=np.array(alike, dtype=np.int64),
        sharding_types=tuple(offers.types.values()),
        compute_kernels=tuple(offers.kernels.values()),
        requests=tuple((kernel_codes[name], request) for name, request in offers.request_codes),
        refused=tuple(own.refused for own in found),
        ids_per_batch=ids,
        bags_per_batch=bags,
        first_option=np.concatenate([[0], np.cumsum(num_options)]).astype(np.int64),
        table=np.repeat(np.arange(len(found)), num_options),
        sharding_type=np.array([type_codes[name] for name in types], dtype=np.int64),
        compute_kernel=np.array([kernel_codes[name] for name in kernels], dtype=np.int64),
        layouts=layouts,
        cuts_rows=_column(layouts, "cuts_rows", bool),
        is_replicated=_column(layouts, "is_replicated", bool),
        sums_inside_host=_column(layouts, "sums_inside_host", bool),
        first_shard=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        option=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        count=_column(runs, "length"),
        num_rows=_column(runs, "num_rows"),
        num_columns=_column(runs, "num_columns"),
        is_copy=_column(runs, "is_copy", bool),
        id_fraction=_column(runs, "id_fraction", np.float64),
        rank=rank,
        gang=gang,
        local_rank=local_rank,
        request=np.array(list(chain.from_iterable(requests)), dtype=np.int64),
    )


def _column(values: Iterable[object], name: str, dtype: type = np.int64) -> npt.NDArray[Any]:
    """An attribute of values."""
    return np.array(list(map(attrgetter(name), values)), dtype=dtype)


def _places(
    runs: Sequence[ShardRun], of_options: Sequence[Runs], topology: Topology
) -> tuple[Ints, Ints, Ints]:
    """Rank, gang and rank in the host of each run; on one host that rank is the rank, and there are no gangs."""
    rank, gang, local_rank = (_column(runs, name) for name in ("rank", "gang", "local_rank"))
    if topology.num_hosts == 1:
        rank = np.where(local_rank == FREE, rank, local_rank)
        return rank, np.full_like(rank, NO_GANG), np.full_like(rank, FREE)
    # Gangs are numbered from 0 inside an option: they are shifted by the gangs of the options before it.
    counts = np.array([1 + max(run.gang for run in own) for own in of_options], dtype=np.int64)
    before = np.repeat(np.cumsum(counts) - counts, list(map(len, of_options)))
    return rank, np.where(gang == NO_GANG, NO_GANG, gang + before), local_rank
