"""Enumeration: tables x sharding types x layouts x compute kernels, into columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from attrs import frozen

from shardwright.contracts.demands import refusal_of_sums
from shardwright.errors import NoPlanError, PlanningError, UnknownPluginError
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.columns import Option, OptionColumns
from shardwright.planning.options.offers import Offers, Plugins
from shardwright.planning.options.options import Options, Refusal
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.option_space import EVERYTHING, OptionSpace
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import OutOfTime, Watch


def enumerate_options(
    tables: Sequence[TableSpec],
    topology: Topology,
    constraints: Constraints,
    plugins: Plugins,
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
    collected = OptionColumns()
    for index, table in enumerate(tables):
        rule = offers.asked(table, constraints.of(table))
        try:
            spec = rule.applied_to(table)
            _check_device(spec, rule, topology)
            key = offers.identity(spec, rule) if fold_tables else table.path
            if collected.add_table(spec, key):
                collected.add_lookups(*_lookups(spec, rule, batch_size))
                _enumerate_table(collected, offers, _Demands(rule, rules, index))
        except UnknownPluginError as error:
            raise UnknownPluginError(
                f"what is asked of table {table.describe()}: {error}", **error.facts
            ) from error
        except OutOfTime:
            raise _ended_early(offers, table, index, len(tables)) from None
    return collected.finish(offers)


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
        f"no plan found: of {count} tables, the options of {index} were known when the time was over, after "
        f"{elapsed_s:.1f} s{part}; the next is {table.describe()}. Allow more time{advice}"
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


@frozen
class _Demands:
    """Demands on a table: its own constraints, and the rules on ranks that it shares with others."""

    rule: ParameterConstraints
    rules: RankRules | None
    index: int

    def refusal(self, layout: Layout) -> str:
        """Explain why the rules on ranks forbid a layout; empty if they do not."""
        return self.rules.refusal(self.index, layout) if self.rules else ""

    @property
    def demands(self) -> tuple[str, ...]:
        """The constraints that leave options out."""
        cutting = (
            *("sharding_types", "compute_kernels", "cache_params", "min_partition"),
            *("ranks", "together", "apart"),
        )
        return tuple(name for name in cutting if name in self.rule.given)


def _enumerate_table(collected: OptionColumns, offers: Offers, own: _Demands) -> None:
    table = collected.tables[-1]
    refusals: list[Refusal] = []
    found = list(_offered(offers, table, own, refusals))
    unique = tuple(dict.fromkeys(refusals))
    if not found:
        optimizers, named = offers.plugins.optimizers, table.optimizer and table.optimizer.name
        if named and optimizers.names and named not in optimizers:
            optimizers.entry(named)  # which raises: no plugin has it, and no kernel took one of that name
        asked = (*own.demands, *(demand.name for demand in offers.demands_on(table, own.rule)))
        raise PlanningError(
            _no_option(table, own, unique, offers), subject=table.path, asked=tuple(dict.fromkeys(asked))
        )
    collected.add_options(found, unique)


def _offered(offers: Offers, table: TableSpec, own: _Demands, refusals: list[Refusal]) -> Iterator[Option]:
    """The options of a table: codes of type and kernel, the layout, and what the kernel is asked for each run."""
    codec = table.qcomms_config.forward if table.qcomms_config else None
    for code in offers.types_for(own.rule):
        kernels = offers.kernels_for(code, table, own.rule, refusals)
        for layout, runs in offers.layouts(code, table, own.rule, refusals):
            reason = own.refusal(layout) or refusal_of_sums(table, codec, cuts_rows=layout.cuts_rows)
            if reason:
                name = list(offers.types)[code]
                refusals.append(Refusal(table.path, "sharding type", name, reason))
                continue
            for kernel in kernels:
                if not offers.goes_with(kernel, layout, table, own.rule, refusals):
                    continue
                extras = {**(own.rule.extras or {}), **layout.extras}
                requests = offers.requests(kernel, table, runs, extras, refusals)
                if requests is not None:
                    yield code, kernel, layout, runs, requests


def _no_option(table: TableSpec, own: _Demands, refusals: Iterable[Refusal], offers: Offers) -> str:
    given = own.rule.to_data()
    constraints = ", ".join(f"{name}={given[name]}" for name in own.demands)
    told = "; ".join(str(refusal).rstrip(".") for refusal in refusals)
    reasons = told or "no sharding type and no compute kernel is loaded"
    by_name = [] if own.rule.sharding_types else offers.types_by_name_only
    unasked = (
        f"Offered only to tables whose sharding_types name them: {', '.join(by_name)}. " if by_name else ""
    )
    return (
        f"no option is left for table {table.describe()} on {offers.topology.world_size} ranks of device "
        f"{_devices_text(offers.topology)}, optimizer {table.optimizer or 'none (visible gradients)'}, "
        f"constraints: {constraints or 'none'}. Refused: {reasons}. "
        f"{unasked}Known sharding types: {', '.join(offers.plugins.sharding_types.names) or 'none'}; "
        f"compute kernels: {', '.join(offers.plugins.compute_kernels.names) or 'none'}. "
        + (f"Loosen what is asked of {table.name!r}, or change" if own.demands else "Change")
        + " what the refusals name."
    )
