"""The planner: from tables, topology and constraints to a plan."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any

import attrs

from shardwright.arguments import Within, check, checked, checked_only, whole
from shardwright.contracts.estimator import Estimator
from shardwright.contracts.partitioner import Partitioner
from shardwright.contracts.proposer import Proposer
from shardwright.errors import InvalidInputError, NoPlanError, PlanningError
from shardwright.host.extensions import ask_at
from shardwright.host.plugin_host import host
from shardwright.planning.arrays import Ints, distinct
from shardwright.planning.documents.limits import MOST_SAMPLES
from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.reservations import (
    SERVING_RESERVATION,
    DenseBytes,
    StorageReservation,
    as_reservation,
)
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import prepare
from shardwright.planning.options.inputs import STORAGE_RESERVATION, Request, describe_inputs
from shardwright.planning.options.options import Options
from shardwright.planning.options.planning_plugins import PlanningPlugins, PluginChoice, origin
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.plan.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    device_of_shards,
)
from shardwright.planning.report.report import Report, objective_data
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.objectives import LARGEST_RANK_TIME, SERVING, checked_objective
from shardwright.planning.search.refinements import (
    REFINEMENT,
    Outcome,
    Refinement,
    Search,
    named_refinements,
    refined,
)
from shardwright.planning.search.search import SearchResult, search
from shardwright.planning.tables.codecs import codecs_of
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.option_space import OptionSpace
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import Listener, Watch

if TYPE_CHECKING:
    from shardwright.host.registry import Registry

_log = logging.getLogger("shardwright")

_PROGRESS, _NO_PLAN = ("method", "progress"), ("method", "no_plan")
_UNEXPLAINED = "no plan found, and no plugin says why ('{}:{}'): see `shardwright plugins`".format(*_NO_PLAN)

WORK_US = 8e6
"""Work that a search may do unless it has a limit of time, in microseconds, which make some ten seconds at most."""


class TablePlanner:
    """Plans how to shard tables that are given by their specifications, without torch.

    :class:`shardwright.EmbeddingShardingPlanner` is one that plans for models too, and tells of the arguments.
    """

    @checked_only("topology", "batch_size", "option_space", "refinements", "listener", "progress", "debug")
    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: Annotated[int, Within(ge=1, le=MOST_SAMPLES)] | None = None,
        *,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        estimator: str | Estimator | None = None,
        storage_estimator: str | Estimator | None = None,
        option_space: OptionSpace | None = None,
        proposer: str | Proposer | Sequence[str | Proposer] | None = None,
        partitioner: str | Partitioner | None = None,
        storage_reservation: float | StorageReservation | None = None,
        objective: str = LARGEST_RANK_TIME,
        seconds: float | None = None,
        refinements: str | Refinement | Sequence[str | Refinement] = (),
        listener: Listener | None = None,
        progress: bool | None = None,
        debug: bool = False,
    ) -> None:
        self._topology = topology
        self._batch_size = whole(batch_size)
        self._constraints = Constraints(constraints)
        self._choice = PluginChoice(estimator, storage_estimator, proposer, partitioner, option_space)
        self._reservation = None if storage_reservation is None else as_reservation(storage_reservation)
        is_number = isinstance(seconds, int | float | Real) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise InvalidInputError(f"seconds is a limit above 0, or None for no limit; got {seconds!r}")
        self._objective = checked_objective(objective)
        if topology is not None:
            self._check_served(topology)
        self._seconds = seconds
        asked: list[Any] = (
            [refinements] if isinstance(refinements, str) or callable(refinements) else [*refinements]
        )
        # Plugins are found and imported now, where the process starts to plan, and their names are known to be right.
        self._refinements = named_refinements(asked, host().extensions)
        self._choice.resolve(host())
        self._constraints.check_names(host().sharding_types, host().compute_kernels)
        self._listener = listener
        self._progress = progress
        self._debug = debug
        self.report: Report | None = None
        """The report of the last plan made in this process."""

    @checked
    def plan_tables(self, tables: Iterable[TableSpec]) -> ShardingPlan:
        """Plan tables given by their specifications; needs no torch.

        Raises:
            PlanningError: no plan fits; the text has the numbers and what would help.
        """
        specs = tuple(tables)
        check("tables", specs, tuple[TableSpec, ...])
        return self._plan(specs, self._known_topology(), on_this_machine=False)

    def _known_topology(self) -> Topology:
        if self._topology is None:
            raise InvalidInputError(
                "the planner has no topology: give EmbeddingShardingPlanner("
                "topology=Topology(world_size=..., compute_device=...)), "
                "or call collective_plan, which derives it from the process group"
            )
        return self._topology

    def _plan(
        self,
        tables: tuple[TableSpec, ...],
        topology: Topology,
        *,
        on_this_machine: bool,
        dense: DenseBytes | None = None,
        watch: Watch | None = None,
    ) -> ShardingPlan:
        start = time.perf_counter()
        _check_tables(tables)
        self._check_served(topology)
        if self._is_serving:
            tables = tuple(table.served() for table in tables)
        # A search breaks ties by the order of tables: theirs must not come from the caller, nor the plan from it.
        given, tables = tables, tuple(sorted(tables, key=_natural_order))
        watch = watch or self._new_watch()
        plugins = self._choice.resolve(host(), topology)
        reservations = self._reservations(dense)
        request = Request(
            topology, self._constraints, self._batch_size, *reservations, self._objective, on_this_machine
        )
        with self._shown(watch):
            run: Search = partial(self._searched, tables, plugins)
            for refinement in plugins.performance.refinements(topology):
                run = refined(f"of estimator {plugins.performance.name}", refinement, run)
            for name, make in self._refinements.items():
                run = refined(name, make(), run)
            found = run(request, watch)
        request, space, result = found.request, found.space, found.result
        if result.plan is None:
            if watch.was_interrupted:
                raise KeyboardInterrupt
            limit = "budget of work" if self._seconds is None else f"limit of {self._seconds} s"
            raise _why_none(space, request, plugins, result, limit) or NoPlanError(_UNEXPLAINED)
        shardings, modules = _shardings(result.plan), dict[str, EmbeddingModuleShardingPlan]()
        for table in given:
            modules.setdefault(table.module, EmbeddingModuleShardingPlan())[table.name] = shardings[
                table.path
            ]
        seconds = time.perf_counter() - start
        inputs = describe_inputs(
            request, space.options, plugins, seconds=seconds, seconds_limit=self._seconds
        )
        inputs |= {name: value.to_data() for name, value in found.inputs.items()}
        document = {
            "objective": objective_data(result.plan, result.proven),
            "topology": topology.to_data(),
            "inputs": inputs,
            "plugins": _origins(result.plan, result.proposer, plugins, self._refinements),
        }
        plan = ShardingPlan(plan=modules, document=document)
        self.report = Report(space, result, inputs, seconds, found.notes)
        if self._debug:
            text = str(self.report)
            _log.info("%s", text)
            print(text)
        return plan

    @property
    def _is_serving(self) -> bool:
        return self._objective == SERVING

    def _check_served(self, topology: Topology) -> None:
        """Check that a plan for serving is not one of replicas that are averaged in training."""
        if self._is_serving and topology.replicas is not None:
            raise InvalidInputError(
                f"objective={SERVING!r} plans tables that are not updated, and this is the topology of a sharding "
                "group, whose replicas are averaged in training: plan for the ranks of one server, Topology(world_size="
                f"{topology.world_size}, ...)"
            )

    def _reservations(self, dense: DenseBytes | None) -> tuple[StorageReservation | None, StorageReservation]:
        """The reservation that was given, if any, and the one to assume, both for a model with such dense tensors."""
        given = self._reservation
        if given is not None and dense is not None:
            given = given.with_dense(dense)
        if not self._is_serving:
            return given, STORAGE_RESERVATION
        return given, SERVING_RESERVATION.with_dense(dense or DenseBytes(0, 0))

    def _searched(
        self,
        tables: tuple[TableSpec, ...],
        plugins: PlanningPlugins,
        request: Request,
        watch: Watch,
    ) -> Outcome:
        """Options, and what a search among them found."""
        # Until there are options there is nothing to return: Ctrl-C then ends planning at once.
        space = prepare(tables, request, plugins, watch=watch)
        if impossible := _why_none(space, request, plugins):
            raise impossible
        with watch.interruptible():
            result = search(
                space,
                plugins.proposers,
                plugins.partitioner,
                plugins.plugin_host.extensions,
                watch=watch,
            )
            return Outcome(request, space, result, plugins.performance)

    def _shown(self, watch: Watch) -> AbstractContextManager[Any]:
        """Show the progress of a search while this lasts, if that is wanted; by default, on a terminal."""
        offered, is_wanted = host().extensions, self._progress
        if is_wanted is None:
            is_wanted = sys.stderr.isatty() and ":".join(_PROGRESS) in offered
        return ask_at(*_PROGRESS, offered, AbstractContextManager, watch) if is_wanted else nullcontext()

    def _new_watch(self) -> Watch:
        """A watch with the user's limit of time, or one of work."""
        return Watch(self._seconds, self._listener, WORK_US if self._seconds is None else math.inf)


def _why_none(
    space: SearchSpace, request: Request, plugins: PlanningPlugins, *found: SearchResult | str
) -> NoPlanError | None:
    """The error that a plugin has for a search to come, or for one that found no plan; ``None`` if it has none."""
    offered = plugins.plugin_host.extensions
    is_offered = ":".join(_NO_PLAN) in offered
    asked = (space, request, plugins, *found)
    return ask_at(*_NO_PLAN, offered, NoPlanError | None, *asked) if is_offered else None


def _check_tables(tables: Sequence[TableSpec]) -> None:
    if not tables:
        raise PlanningError(
            "there are no tables to plan: no module of the model is one that the sharders shard. In place of "
            "torch.nn.EmbeddingBag take an EmbeddingBagCollection: `shardwright docs two_ranks` shows how"
        )
    repeated = [path for path, count in Counter(table.path for table in tables).items() if count > 1]
    if repeated:
        raise InvalidInputError(
            f"two tables have the path {repeated[0]!r}; each needs its own name in its module"
        )


def _natural_order(table: TableSpec) -> tuple[list[Any], str]:
    """A key by which ``t2`` comes before ``t10``; equal for no two paths."""
    pieces = re.split(r"([0-9]+)", table.path)
    return [int(piece) if index % 2 else piece for index, piece in enumerate(pieces)], table.path


def _shardings(plan: LoadedPlan) -> dict[str, ParameterSharding]:
    """The chosen options with their ranks, by a table's path."""
    space, options, found = plan.space, plan.space.options, dict[str, ParameterSharding]()
    _check_layouts(space, plan.proposal)
    placed: dict[tuple[int, tuple[int, ...]], Layout] = {}
    for table, option, ranks in zip(
        options.all_tables, plan.proposal.tolist(), plan.ranks_of_tables, strict=True
    ):
        layout = placed.get((option, ranks))
        if layout is None:
            layout = placed[option, ranks] = _with_extras(options, option).placed(ranks)
        found[table.path] = ParameterSharding(
            options.type_of(option).name,
            options.kernel_of(option).name,
            layout,
            device=device_of_shards(space.topology),
            qcomms_config=table.qcomms_config,
            local_world_size=space.topology.local_world_size,
        )
    return found


def _with_extras(options: Options, option: int) -> Layout:
    """The layout of an option, with what its kernel has to say in the plan."""
    layout, request = options.layouts[option], options.request[options.first_shard[option]]
    extras = options.kernel_of(option).extras(options.requests[int(request)][1])
    return attrs.evolve(layout, extras={**layout.extras, **extras}) if extras else layout


def _check_layouts(space: SearchSpace, proposal: Ints) -> None:
    """Check that the layouts that were chosen cover each row and column of their tables once."""
    options = space.options
    for option in distinct(proposal).tolist():
        table = options.tables[int(options.table[option])]
        try:
            options.layouts[option].check(table, world_size=space.topology.world_size)
        except InvalidInputError as error:
            kind = options.type_of(option).name
            raise PlanningError(f"sharding type {kind!r} broke its contract: {error}") from error


def _origins(
    plan: LoadedPlan, proposer: str, plugins: PlanningPlugins, refinements: Iterable[str]
) -> list[dict[str, str]]:
    """List the plugins that made the plan, with their distributions and versions."""
    options, chosen, registries = plan.space.options, plan.proposal.tolist(), plugins.plugin_host
    used: list[tuple[Registry[Any], Any]] = [
        *((registries.sharding_types, options.type_of(option)) for option in set(chosen)),
        *((registries.compute_kernels, options.kernel_of(option)) for option in set(chosen)),
        *((registries.codecs, codec) for table in options.tables for codec in codecs_of(table.qcomms_config)),
        (registries.estimators, plugins.performance),
        (registries.estimators, plugins.storage),
        *((registries.proposers, plugin) for plugin in plugins.proposers if plugin.name == proposer),
        (registries.partitioners, plugins.partitioner),
        *(
            (registries.extensions, registries.extensions.create(name))
            for name in (f"{REFINEMENT}:{refinement}" for refinement in refinements)
            if name in registries.extensions
        ),
    ]
    origins = {(registry.kind.label, plugin.name): origin(registry, plugin) for registry, plugin in used}
    return [origins[key] for key in sorted(origins)]
