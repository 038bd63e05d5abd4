"""Offers of sharding types and compute kernels for tables; each is asked the same only once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import attrs

from shardwright.arguments import brief
from shardwright.contracts.compute_kernel import NAMED_ONLY, NO_COLUMNS, WEIGHTS, ComputeKernel, KernelRequest
from shardwright.contracts.demands import Demand, demands_on, disobeyed
from shardwright.contracts.sharding_type import ALWAYS, ShardingType
from shardwright.errors import PlanningError, UnknownNameError
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.layout_offers import LayoutOffer, reason_of
from shardwright.planning.options.options import KERNEL, TYPE, Refusal
from shardwright.planning.options.shapes import Runs
from shardwright.planning.plugin_calls import calling, check_answer
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.option_space import OptionSpace
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import Watch

if TYPE_CHECKING:
    from shardwright.host.plugin_host import PluginHost
    from shardwright.host.registry import Registry

_NO_COLUMNS = "it asks for columns beside ids, which reach no table that every rank has a copy of"
_NOT_ALLOWED = "the sharder of the table's module does not allow it"
# Whether a kernel runs optimizers -> the reason why it is not offered unasked.
_BY_NAME_ALONE = {
    True: "is taken only when asked for by name",
    False: "applies no optimizer in the backward pass, and is taken only when asked for by name",
}


shape_key: Callable[[TableSpec], tuple[Any, ...]] = attrgetter(
    *(a.name for a in attrs.fields(TableSpec) if a.name not in ("name", "module", "feature_names"))
)
"""All of a table but its name, its module and its features: tables with equal answers are alike."""


class Offers:
    """The sharding types and kernels in use, by name, and what they answered."""

    def __init__(
        self, plugins: PluginHost, topology: Topology, on_this_machine: bool, space: OptionSpace, watch: Watch
    ) -> None:
        self.plugins = plugins
        self.topology = topology
        self.on_this_machine = on_this_machine
        self.space = space
        self.watch = watch
        self.seconds: dict[str, float] = defaultdict(float)
        """Time of each sharding type's answers, s."""
        self.types: dict[str, ShardingType] = {}
        self.kernels: dict[str, ComputeKernel] = {}
        self.request_codes: dict[tuple[str, KernelRequest], int] = {}
        self._offers: dict[Hashable, LayoutOffer] = {}
        # Each is asked the same only once.
        self._filled = cache(space.fill)
        self.types_for = cache(self._types_for)
        self._answer = cache(self._ask)

    def asked(self, table: TableSpec, rule: ParameterConstraints) -> ParameterConstraints:
        """Fill in what the offers leave to default in a table's constraints; one object for all that are equal.

        A sharder that allows a single sharding type names it, and one that allows only types which are offered to
        nobody who does not name them names those.
        """
        if rule.sharding_types is None and table.allowed is not None:
            names = [name for name, _ in table.allowed]
            if len(names) == 1 or (names and set(names).isdisjoint(self.types_for(rule))):
                rule = attrs.evolve(rule, sharding_types=names)
        return self._filled(rule)

    def identity(self, table: TableSpec, rule: ParameterConstraints) -> Hashable:
        """Return a key of a table, equal for tables that are alike to all that plans them.

        A sharding type that may look at a table's name is asked for each table, and then its answers tell.
        """
        answers: list[Hashable] = []
        for name in self.types_for(rule):
            if not self.types[name].depends_on_shape_only:
                offer = self._offer(name, table, rule)
                with calling(f"sharding type {name!r}"):
                    answers.append((offer.reason, *(layout.digest() for layout, _ in offer.layouts)))
        return (*shape_key(table), table.num_features, rule, *answers)

    def _types_for(self, rule: ParameterConstraints) -> list[str]:
        """The sharding types that ``rule`` allows, in the order of names or of the constraint."""
        asked = rule.sharding_types
        return [
            name
            for name in _made(self.plugins.sharding_types, self.types, asked)
            if self.space.has(name, rule) and (asked is not None or self.types[name].offered == ALWAYS)
        ]

    @property
    def types_by_name_only(self) -> list[str]:
        """The sharding types that no table is offered whose constraints do not name them."""
        kinds = map(self.plugins.sharding_types.create, self.plugins.sharding_types)
        return [kind.name for kind in kinds if kind.offered != ALWAYS]

    def names_asked(self, table: TableSpec, rule: ParameterConstraints) -> set[str]:
        """The names of sharding types and kernels in a table's constraints and in what its sharder allows."""
        types, kernels = self.plugins.sharding_types, self.plugins.compute_kernels
        of_sharder = dict(table.allowed or ())
        return {
            *(types.entry(name).name for name in rule.sharding_types or ()),
            *(kernels.entry(name).name for name in rule.compute_kernels or ()),
            *of_sharder,
            *chain.from_iterable(filter(None, of_sharder.values())),
        }

    def kernels_for(
        self, kind: str, table: TableSpec, rule: ParameterConstraints, refusals: list[Refusal]
    ) -> list[str]:
        """The kernels that may serve ``table`` with a sharding type, the preferred first.

        Kernels that show gradients are for tables without an optimizer, or for those who name them.
        """
        allowed = table.kernels_allowed(kind)
        asked = rule.compute_kernels or allowed or self.space.kernels_of(kind, rule)
        found, left_out = self._kernels(asked, table.optimizer is None)
        kept = found if allowed is None else [name for name in found if name in allowed]
        reasons = {name: _BY_NAME_ALONE[self.kernels[name].fuses_optimizer] for name in left_out}
        reasons |= {name: _NOT_ALLOWED for name in found if name not in kept}
        refusals += [Refusal(table.path, KERNEL, name, reason) for name, reason in reasons.items()]
        return kept

    def _kernels(self, asked: Sequence[str] | None, shows_gradients: bool) -> tuple[list[str], list[str]]:
        """The kernels, and those that are left out."""
        names, kernels = _made(self.plugins.compute_kernels, self.kernels, asked), self.kernels
        if asked is not None:
            return names, []
        names.sort(key=lambda name: (-kernels[name].preference, name))
        willing = [name for name in names if kernels[name].preference != NAMED_ONLY]
        kept = [name for name in willing if kernels[name].fuses_optimizer or shows_gradients]
        return kept, [name for name in names if name not in kept]

    def layouts(
        self, kind: str, table: TableSpec, rule: ParameterConstraints, refusals: list[Refusal]
    ) -> Sequence[tuple[Layout, Runs]]:
        """List a sharding type's layouts for ``table``; add a refusal if there are none."""
        is_allowed = table.allowed is None or kind in dict(table.allowed)
        offer = self._offer(kind, table, rule) if is_allowed else LayoutOffer(reason=_NOT_ALLOWED)
        if offer.reason:
            refusals.append(Refusal(table.path, TYPE, kind, offer.reason))
        return offer.layouts

    def _offer(self, name: str, table: TableSpec, rule: ParameterConstraints) -> LayoutOffer:
        """Return a sharding type's answer for a table."""
        kind = self.types[name]
        key: Hashable = (name, table.path, rule)
        if kind.depends_on_shape_only:
            key = (name, shape_key(table), rule.sharding_types, rule.min_partition, rule.device_group)
        if key not in self._offers:
            self._offers[key] = self._ask_type(kind, table, rule)
        return self._offers[key]

    def _ask_type(self, kind: ShardingType, table: TableSpec, rule: ParameterConstraints) -> LayoutOffer:
        self.watch.go_on()
        start = time.perf_counter()
        try:
            return LayoutOffer.of(kind, table, self.topology, rule, self.watch.go_on)
        finally:
            self.seconds[kind.name] += time.perf_counter() - start

    def goes_with(
        self,
        kernel: str,
        layout: Layout,
        table: TableSpec,
        rule: ParameterConstraints,
        refusals: list[Refusal],
    ) -> bool:
        """True if a kernel takes the ids that a layout sends, and obeys; otherwise one more refusal is added."""
        demand = disobeyed(self.kernels[kernel], self.demands_on(table, rule, layout.row_map))
        if demand:
            refusals.append(Refusal(table.path, KERNEL, kernel, demand.refusal(table)))
        return demand is None

    def demands_on(
        self, table: TableSpec, rule: ParameterConstraints, row_map: RowMap | None = None
    ) -> Iterator[Demand]:
        """List the demands on a table that not every kernel obeys."""
        named = map(self.plugins.compute_kernels.create, rule.compute_kernels or ())
        return demands_on(table, row_map, rule, list(named))

    def requests(
        self, kernel: str, table: TableSpec, runs: Runs, extras: Mapping[str, Any], refusals: list[Refusal]
    ) -> list[int] | None:
        """The request code of each run, or ``None`` if the kernel refuses one of them.

        Args:
            kernel: name of the kernel.
            table: table to look up.
            runs: blocks of a layout.
            extras: JSON data of plugins, of its constraints and its layout.
            refusals: get one more if the kernel refuses.
        """
        codes: dict[tuple[int, str, bool], int] = {}
        asked_of_runs = [(run.num_columns, run.device, run.is_copy) for run in runs]
        for asked in dict.fromkeys(asked_of_runs):
            codes[asked], reason = self._request(kernel, table, asked, extras)
            if reason:
                refusals.append(Refusal(table.path, KERNEL, kernel, reason))
                return None
        return [codes[asked] for asked in asked_of_runs]

    def _request(
        self, kernel: str, table: TableSpec, asked: tuple[int, str, bool], extras: Mapping[str, Any]
    ) -> tuple[int, str]:
        """The code of the request for a block: of so many columns, on a device, a copy or not; or why it is refused."""
        width, device, is_copy = asked
        request = KernelRequest.of(
            table, width, device=device, on_this_machine=self.on_this_machine, extras=extras
        )
        reason = self._answer(kernel, request)
        if not reason and is_copy and self.kernels[kernel].columns(request):
            reason = _NO_COLUMNS
        code = -1 if reason else self.request_codes.setdefault((kernel, request), len(self.request_codes))
        return code, reason

    def _ask(self, name: str, request: KernelRequest) -> str:
        kernel = self.kernels[name]
        with calling(f"compute kernel {name!r}"):
            answer = kernel.refusal_of_rows(request) or kernel.supports(request)
            return self._checked(kernel, request) if answer is True else reason_of(answer)

    def _checked(self, kernel: ComputeKernel, request: KernelRequest) -> str:
        """Check what a kernel says of a request that it supports; why it cannot be served here all the same."""
        who = f"compute kernel {kernel.name!r}"
        declared, reads = kernel.memory_bytes(request, 1), kernel.reads(request)
        columns = kernel.columns(request)
        fraction = kernel.bandwidth_fraction(request)
        for method, told, hint in (
            ("memory_bytes", declared, Mapping[str, int]),
            ("reads", reads, Mapping[str, float]),
            ("extras", kernel.extras(request), Mapping[str, object]),
            ("bandwidth_fraction", fraction, float),
            ("columns", columns, Mapping[str, Literal["int64", "float32"]]),
            ("needs_whole_rows", kernel.needs_whole_rows(request), bool),
        ):
            check_answer(who, method, told, hint)
        for must, is_so, answer in (
            ("bandwidth_fraction() must be above 0 and up to 1", 0 < fraction <= 1, fraction),
            (
                "memory_bytes() must have a tier, and none below 0",
                min(declared.values(), default=-1) >= 0,
                declared,
            ),
            (
                "the parts of reads() must be 0 or more, and 1 together",
                abs(sum(reads.values()) - 1) < 1e-6 and min(reads.values()) >= 0,
                reads,
            ),
            (
                f"columns() must not name {', '.join(map(repr, (*NO_COLUMNS, WEIGHTS)))}",
                columns.keys().isdisjoint((WEIGHTS, *NO_COLUMNS)),
                columns,
            ),
        ):
            if not is_so:
                raise PlanningError(f"{who} broke its contract: {must}; it is {brief(answer)}")
        return self._missing_tier(declared, request.device)

    def _missing_tier(self, declared: Mapping[str, int], device: str) -> str:
        try:
            for tier in declared:
                self.topology.tier_of(tier, device)
        except UnknownNameError as error:
            return str(error)
        return ""


def _made(registry: Registry[Any], known: dict[str, Any], asked: Sequence[str] | None) -> list[str]:
    """The names of plugins, those asked for or all, each once; those that are not known yet are made."""
    names = dict.fromkeys(registry if asked is None else (registry.entry(name).name for name in asked))
    for name in names:
        if name not in known:
            known[name] = registry.create(name)
    return list(names)
