"""Resharding of a running model.

Every rank does, in this order:

1. each checks what it was given; they agree on that, and tell each other which values their blocks have (one
   gathering);
2. each makes the engine of the new plan over lookups that hold nothing, and reckons the memory that it needs; nothing
   has changed until here, and whatever one refuses, all refuse;
3. piece by piece, an all-to-all carries rows of weights and states; which rows follows from the two plans;
4. they meet: a rank that is lost before leaves the others as they were, one that is lost later under the new plan;
5. each makes the engine over the lookups that came, and module, optimizers and groups go on with it.

Where there are several sharding groups, all ranks of all of them gather; rows move inside each group, so that replicas
keep what each has.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any, TypeAlias

from attrs import define, evolve, field, frozen
from torch import nn
from torch.optim import Optimizer

from shardwright.contracts.lookup import Lookup
from shardwright.errors import InvalidInputError, PlanError, UnsupportedError, nearest
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import bytes_text
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.collections.sharded_collection import (
    ShardedCollection,
    ShardingInputs,
    engine_of,
    local_blocks,
)
from shardwright.runtime.sharded.collections.sharded_module import check_plan_covers
from shardwright.runtime.sharded.resharding.blocks import (
    TableMove,
    TableValues,
    agreed_values,
    describe_values,
    lookup_values,
    new_states,
    place_of,
    values_of,
)
from shardwright.runtime.sharded.resharding.exchange import RowExchange
from shardwright.runtime.sharded.resharding.keyed import (
    FlowId,
    KeyedRows,
    copy_rows,
    exchange_keys,
    key_bytes,
)
from shardwright.runtime.sharded.resharding.schedule import (
    Departures,
    LookupId,
    MemoryPlan,
    Stage,
    stages_of,
)
from shardwright.runtime.sharded.resharding.unbuilt import UnbuiltLookup
from shardwright.runtime.sharded.resharding.users import UserOptimizers
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright.runtime.sharded.tables.table_state import LocalBlock
from shardwright.runtime.step.kernel_groups import (
    KernelGroup,
    build_lookup,
    check_layout,
    is_updated_in_backward,
    kernel_of,
)

PIECE_BYTES = 64 << 20
"""Most that a rank sends or receives at once, unless asked otherwise."""

Asked: TypeAlias = Mapping[str, tuple[ShardedCollection, Mapping[str, ParameterSharding]]]
"""By path: a module, and how its tables are to be sharded."""


@frozen
class Resharded:
    """Outcome of a resharding.

    Args:
        tables: paths of the tables that are sharded otherwise now.
        sent_bytes: rows that this rank sent to others.
        peak_bytes: memory that this rank needed beside what it had, as reckoned beforehand.
    """

    tables: tuple[str, ...] = ()
    sent_bytes: int = 0
    peak_bytes: int = 0


def modules_under(plan: ShardingPlan, sharded: Mapping[str, nn.Module]) -> Asked:
    """The modules of a model with the parts of a plan that are for them.

    Raises:
        PlanError: the plan is for other modules.
        UnsupportedError: a module is none of shardwright's own.
    """
    if not isinstance(plan, ShardingPlan):
        raise InvalidInputError(f"reshard() takes a ShardingPlan, got a {type(plan).__name__}")
    for path in plan.plan:
        if path not in sharded:
            raise PlanError(
                f"the plan is for a module at {path!r}, which is not sharded.{nearest(path, sharded)}"
            )
    asked = {}
    for path, module in sharded.items():
        if path not in plan.plan:
            raise PlanError(f"the plan has nothing for the module at {path!r}; it is for {sorted(plan.plan)}")
        if not isinstance(module, ShardedCollection):
            raise UnsupportedError(f"a {type(module).__name__} at {path!r} cannot be resharded")
        asked[path] = (module, plan.plan[path])
    return asked


def reshard(
    asked: Asked,
    env: ShardingEnv,
    optimizers: Sequence[Optimizer],
    *,
    max_extra_bytes: int | None,
    piece_bytes: int | None,
) -> Resharded:
    """Go from one plan to another; see :meth:`DistributedModelParallel.reshard`."""
    with env.everyone.together("reshard()"):
        resharding = _Resharding(asked, env, UserOptimizers.of(optimizers), max_extra_bytes)
        resharding.agree()
        if not resharding.modules:
            return Resharded()
        resharding.reckon(piece_bytes or _piece_bytes(max_extra_bytes))
        env.everyone.agree("reckoning the memory of a resharding")
        old_tables = resharding.move()
        env.everyone.agree("the end of reshard(), when all rows have come")
    return resharding.hand_over(old_tables)


def _piece_bytes(max_extra_bytes: int | None) -> int:
    return PIECE_BYTES if max_extra_bytes is None else min(PIECE_BYTES, max(max_extra_bytes // 8, 1))


def _order(sharding: ParameterSharding, spec: TableSpec) -> tuple[str, bool, int, str]:
    return sharding.compute_kernel, sharding.layout.is_replicated, spec.embedding_dim, spec.path


def _bytes_of(group: KernelGroup) -> int:
    """Bytes of a group's blocks, in whatever memory."""
    return sum(
        sum(group.kernel.memory_bytes(spec.request, spec.block.num_rows).values()) for spec in group.blocks
    )


def _state_bytes(move: TableMove, local: Sequence[LocalBlock]) -> int:
    """Bytes that the user's optimizer keeps of some blocks."""
    return sum(
        own.block.num_rows * entry.row_bytes(own.block.num_columns)
        for own in local
        for entry in move.values.own_states
    )


def _check_change(spec: TableSpec, old: ParameterSharding, new: ParameterSharding) -> None:
    was, will_be = is_updated_in_backward(spec, old), is_updated_in_backward(spec, new)
    if was != will_be:
        raise UnsupportedError(
            f"table {spec.describe()}: the kernel {old.compute_kernel!r} {_runs(was)}, {new.compute_kernel!r} "
            f"{_runs(will_be)}: it cannot go from one to the other while it is trained. Save a checkpoint and build "
            "the model again"
        )


def _give_back() -> None:
    """Have the C library give freed memory back to the system, where it can be asked to.

    glibc keeps pieces below 32 MiB, so that old blocks would still count as the process's: of 0.5 GiB in 12 tables on 2
    ranks, 253 MiB beside what was there instead of 57 MiB, for ``max_extra_bytes`` of 77 MiB
    (``tests/benchmarks/reshard.py``).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _runs(is_fused: bool) -> str:
    return "runs the optimizer" if is_fused else "leaves it to one of your own"


def _check_optimizer(spec: TableSpec, values: TableValues) -> None:
    if values.optimizer is None:
        raise InvalidInputError(
            f"table {spec.describe()} gets new parameters, and no optimizer that was given has its old ones: give "
            "those that train it, reshard(plan, optimizer)"
        )


def _check_rows_can_move(move: TableMove) -> None:
    """Check that it can be told where a row is: by the plan, or by a kernel that says which keys it has."""
    old, new = (side.layout.row_map.takes_any_id for side in (move.old, move.new))
    states = [kernel_of(side.compute_kernel).row_state for side in (move.old, move.new)]
    if old != new:
        raise UnsupportedError(
            f"table {move.spec.describe()}: its ids are {'keys' if old else 'rows'} now, and "
            f"{'keys' if new else 'rows'} under the new plan: it cannot go from one to the other while it is trained"
        )
    if old and (not states[0] or states[0] != states[1]):
        raise UnsupportedError(
            f"table {move.spec.describe()}: its ids are keys, and where a key's row is, its kernel alone knows; "
            f"{move.old.compute_kernel!r} tells {list(states[0]) or 'nothing'} of a row, {move.new.compute_kernel!r} "
            f"takes {list(states[1]) or 'nothing'}. Leave this table and those that share its kernel group as they are"
        )


@define(eq=False, slots=False)
class _Module:
    """A module that gets another plan.

    Args:
        number: its place among these.
        module: itself.
        inputs: its part of the new plan.
    """

    number: int
    module: ShardedCollection
    inputs: ShardingInputs

    @cached_property
    def unbuilt(self) -> Any:
        """The engine of the new plan, over lookups that hold nothing."""
        return engine_of(self.inputs, self.module.engine, UnbuiltLookup)

    @cached_property
    def kept(self) -> dict[int, int]:
        """The lookups that stay as they are: numbers of the new engine's, and what they were in the old one."""
        old, kept = self.module.engine.groups, {}
        for number, group in enumerate(self.unbuilt.groups):
            same = next((n for n, other in enumerate(old) if _is_same_group(group, other)), None)
            if same is not None:
                kept[number] = same
        return kept

    @cached_property
    def blocks(self) -> dict[str, list[LocalBlock]]:
        """The new blocks here, by table."""
        return local_blocks(self.unbuilt)


def _is_same_group(one: KernelGroup, other: KernelGroup) -> bool:
    return one.kernel_name == other.kernel_name and one.blocks == other.blocks


@define(eq=False)
class _Resharding:
    """A resharding on one rank.

    Args:
        asked: modules and plans.
        env: the ranks.
        users: the user's optimizers.
        max_extra_bytes: most memory to take beside; ``None``: no limit, and nothing is freed before the end.

    Attributes:
        modules: those whose plan changes.
    """

    asked: Asked
    env: ShardingEnv
    users: UserOptimizers
    max_extra_bytes: int | None
    modules: list[_Module] = field(factory=list)
    _moves: list[TableMove] = field(factory=list)
    _owners: list[_Module] = field(factory=list)
    _stages: list[Stage] = field(factory=list)
    _memory: MemoryPlan = field(factory=MemoryPlan)
    _is_moving: list[bool] = field(factory=list)
    _kept: list[bool] = field(factory=list)
    _peak_bytes: int = 0
    _sent_bytes: int = 0
    _built: dict[LookupId, Lookup] = field(factory=dict)
    _old: dict[LookupId, Lookup] = field(factory=dict)

    # 1. Plans

    def agree(self) -> None:
        """Find what changes.

        Raises:
            ShardwrightError: this rank has a reason against it.
            DistributedError: the ranks were given different plans, or numbers of optimizers.
        """
        asked: dict[str, Any] = {"the number of optimizers": len(self.users.leaves)}
        values = self._checked(asked)
        everyone = self.env.everyone
        everyone.agree("the arguments of reshard()", asked, "Give every rank the same plan and optimizers")
        told = everyone.communicator.all_gather_objects(values)
        group = [told[rank] for rank in self.env.ranks_of_all]
        self._find_moves({path: [other[path] for other in group] for path in values})

    def _checked(self, asked: dict[str, Any]) -> dict[str, TableValues | None]:
        """Check the new plan of each table, and describe it in ``asked``.

        Returns:
            Description of this rank's values of each table that may move; ``None`` of a table without a block here.
        """
        if self.max_extra_bytes is not None and self.max_extra_bytes < 1:
            raise InvalidInputError(f"max_extra_bytes must be 1 at least, got {self.max_extra_bytes}")
        values: dict[str, TableValues | None] = {}
        for path, (module, params) in self.asked.items():
            check_plan_covers(module.inputs.specs, params, path)
            for spec in module.inputs.specs:
                check_layout(spec, params[spec.name], self.env.world_size)
                kind, digest = params[spec.name].sharding_type, hashlib.sha256(params[spec.name].digest())
                asked[f"the plan of table {spec.path!r}"] = f"{kind} {digest.hexdigest()[:12]}"
            if not self._changes(module, params):
                continue
            for table in module.sharded_tables.values():
                table.state.check_float("do not move between plans: shard the unsharded model by the new one")
            reason = module.engine.unfinished()
            if reason:
                raise UnsupportedError(f"the module at {path!r} cannot be resharded now: {reason}")
            for spec in module.inputs.specs:
                table = module.sharded_tables[spec.name]
                _check_change(spec, module.inputs.params[spec.name], params[spec.name])
                values[spec.path] = describe_values(
                    table, self.users.states_of(table), self.users.holder_of(table)
                )
        return values

    @staticmethod
    def _changes(module: ShardedCollection, params: Mapping[str, ParameterSharding]) -> bool:
        own = module.inputs.params
        return any(own[name].digest() != params[name].digest() for name in own)

    def _find_moves(self, told: Mapping[str, Sequence[TableValues | None]]) -> None:
        for module, params in self.asked.values():
            if not self._changes(module, params):
                continue
            inputs = evolve(module.inputs, params=dict(params))
            self.modules.append(_Module(len(self.modules), module, inputs))
        every = [(owner, spec) for owner in self.modules for spec in owner.inputs.specs]
        # Tables of one kernel and width after each other: they share lookups, which are freed together.
        every.sort(key=lambda pair: _order(pair[0].module.inputs.params[pair[1].name], pair[1]))
        for owner, spec in every:
            old, new = owner.module.inputs.params[spec.name], owner.inputs.params[spec.name]
            values = agreed_values(spec, told[spec.path])
            if not spec.is_frozen and not is_updated_in_backward(spec, old):
                _check_optimizer(spec, values)
            row_state = kernel_of(old.compute_kernel).row_state if old.layout.row_map.takes_any_id else ()
            self._moves.append(TableMove(spec, old, new, values, row_state=row_state))
            self._owners.append(owner)
            self._is_moving.append(old.layout.digest() != new.layout.digest())

    # 2. Memory

    def reckon(self, piece_bytes: int) -> None:
        """Reckon what moves when and what memory that takes.

        Raises:
            UnsupportedError: a kernel cannot do what the plan asks, or a table cannot move.
            InvalidInputError: it takes more than ``max_extra_bytes`` on a rank.
        """
        self._kept = [self._find_kept(number) for number in range(len(self._moves))]
        for move, is_kept in zip(self._moves, self._kept, strict=True):
            if not is_kept:
                _check_rows_can_move(move)
        self._stages = list(stages_of(self._moves, self._is_moving, piece_bytes))
        self._memory = self._memory_plan()
        frees = self.max_extra_bytes is not None
        self._peak_bytes = self._memory.peak_bytes(self._stages, frees=frees)
        if self.max_extra_bytes is not None and self._peak_bytes > self.max_extra_bytes:
            everyone = self.env.everyone
            raise InvalidInputError(
                f"rank {everyone.communicator.global_ranks[everyone.rank]} needs {bytes_text(self._peak_bytes)} beside "
                f"what it has to reshard; max_extra_bytes allows {bytes_text(self.max_extra_bytes)}. Blocks of one "
                "kernel group are allocated and freed together: allow more, change fewer tables at a time, or save a "
                "checkpoint and load it under the new plan"
            )

    def _find_kept(self, number: int) -> bool:
        """Ask whether all blocks of a table here stay where they are, in memory too."""
        owner, name = self._owners[number], self._moves[number].spec.name
        old = {local.lookup for local in owner.module.sharded_tables[name].state.local}
        new = {local.lookup for local in owner.blocks.get(name, ())}
        return old <= set(owner.kept.values()) and new <= set(owner.kept)

    def _memory_plan(self) -> MemoryPlan:
        old, new = {}, {}
        for owner in self.modules:
            kept = set(owner.kept.values())
            for number, group in enumerate(owner.module.engine.groups):
                if number not in kept:
                    old[owner.number, number] = _bytes_of(group)
            for number, group in enumerate(owner.unbuilt.groups):
                if number not in owner.kept:
                    new[owner.number, number] = _bytes_of(group)
        old_of, new_of, old_states, new_states_ = {}, {}, {}, {}
        for number, move in enumerate(self._moves):
            owner, name = self._owners[number], move.spec.name
            before, after = owner.module.sharded_tables[name].state.local, owner.blocks.get(name, [])
            old_of[number] = {(owner.number, own.lookup) for own in before} & old.keys()
            new_of[number] = {(owner.number, own.lookup) for own in after} & new.keys()
            if not self._kept[number]:
                old_states[number] = _state_bytes(move, before) + key_bytes(move, [*before, *after])
                new_states_[number] = _state_bytes(move, after) + key_bytes(move, [*before, *after])
        return MemoryPlan(old, new, old_of, new_of, old_states, new_states_)

    # 3. Rows

    def move(self) -> list[ShardedTable]:
        """Move rows; returns the tables to take optimizer states from, none if old blocks were let go."""
        tables = [self._table(number) for number in range(len(self._moves))]
        self._find_sources(tables)
        if self.max_extra_bytes is not None:
            self._let_go(tables)
            tables = []
        exchange = RowExchange(self.env, self._moves)
        left = Departures(self._memory.old_of)
        for stage in self._stages:
            for number in stage.begun:
                self._make_room(number)
                if self._moves[number].is_keyed and self._is_moving[number]:
                    exchange.keyed[number] = self._exchange_keys(number)
            if stage.windows:
                exchange.make(stage.windows)
            for number in stage.ended:
                self._end(number, left)
        self._sent_bytes = exchange.sent_bytes
        return tables

    def _table(self, number: int) -> ShardedTable:
        return self._owners[number].module.sharded_tables[self._moves[number].spec.name]

    def _find_sources(self, tables: Sequence[ShardedTable]) -> None:
        for owner in self.modules:
            for number, lookup in enumerate(owner.module.engine.lookups):
                self._old[owner.number, number] = lookup
        for move, table in zip(self._moves, tables, strict=True):
            states = self.users.states_of(table)
            for local, state in zip(table.state.local, states, strict=True):
                place = place_of(local.block)
                move.sources[place] = values_of(table, local, state)
                if move.is_keyed:
                    move.row_states[place] = table.lookup_of(local).row_state(local.index)

    def _let_go(self, tables: Sequence[ShardedTable]) -> None:
        """Have nobody but this hold the old blocks, so that they are freed when their rows have left."""
        for number, table in enumerate(tables):
            holder = self._moves[number].values.optimizer
            if holder is not None and not self._kept[number]:
                self.users.forget(table, holder)
        for owner in self.modules:
            owner.module.take_over(owner.inputs, owner.unbuilt)

    def _make_room(self, number: int) -> None:
        """Allocate a table's new blocks, unless other tables' have them."""
        move, owner = self._moves[number], self._owners[number]
        for local in owner.blocks.get(move.spec.name, ()):
            lookup, place = self._lookup(owner, local.lookup), place_of(local.block)
            if local.lookup in owner.kept:
                move.targets[place] = move.sources[place]
                continue
            values = {**lookup_values(lookup, local.index), **new_states(lookup, local.index, move.values)}
            lacking = {entry.name for entry in move.values.entries} ^ values.keys()
            if lacking:
                raise UnsupportedError(
                    f"table {move.spec.describe()}: kernels {move.old.compute_kernel!r} and "
                    f"{move.new.compute_kernel!r} do not both keep {sorted(lacking)}"
                )
            move.targets[place] = values

    def _exchange_keys(self, number: int) -> dict[FlowId, KeyedRows]:
        """Have the new blocks here find rows for their keys; those that stay as they are have theirs."""
        owner, move = self._owners[number], self._moves[number]
        targets = {
            place_of(local.block): (self._lookup(owner, local.lookup), local.index)
            for local in owner.blocks.get(move.spec.name, ())
            if local.lookup not in owner.kept
        }
        return exchange_keys(self.env, move, targets)

    def _lookup(self, owner: _Module, number: int) -> Lookup:
        """A lookup of the new plan: one that stays, or one allocated when it is first asked for."""
        key = owner.number, number
        if key not in self._built:
            group = owner.unbuilt.groups[number]
            self._built[key] = (
                self._old[owner.number, owner.kept[number]]
                if number in owner.kept
                else build_lookup(group, owner.inputs.device)
            )
        return self._built[key]

    def _end(self, number: int, left: Departures) -> None:
        """A table's rows have come."""
        move, owner = self._moves[number], self._owners[number]
        if not self._is_moving[number]:
            self._copy_here(move, owner)
        if move.values.step is not None:
            for local in owner.blocks.get(move.spec.name, ()):
                self._lookup(owner, local.lookup).load_step(move.values.step)
        if self.max_extra_bytes is not None:
            move.sources.clear()
            move.row_states.clear()
            freed = left.after(number)
            for lookup in freed:
                del self._old[lookup]
            if freed:
                _give_back()

    def _copy_here(self, move: TableMove, owner: _Module) -> None:
        """Copy a table's blocks that stay on this rank, where their lookups are new."""
        for local in owner.blocks.get(move.spec.name, ()):
            if local.lookup in owner.kept:
                continue
            if move.is_keyed:
                copy_rows(move, local.block, self._lookup(owner, local.lookup), local.index)
                continue
            place = place_of(local.block)
            for name, value in move.sources[place].items():
                move.targets[place][name].copy_(value)

    # 4. What goes on

    def hand_over(self, old_tables: Sequence[ShardedTable]) -> Resharded:
        """Have modules and the user's optimizers go on with the new blocks; no rank waits for another."""
        for number, table in enumerate(old_tables):
            holder = self._moves[number].values.optimizer
            if holder is not None and not self._kept[number]:
                self.users.forget(table, holder)
        for owner in self.modules:
            engine = engine_of(owner.inputs, owner.module.engine, self._handed(owner))
            owner.module.take_over(owner.inputs, engine)
        for number, move in enumerate(self._moves):
            if move.values.optimizer is not None and not self._kept[number]:
                self._give_states(number, move)
            if move.is_keyed and not self._kept[number]:
                self._table(number).forget_loaded_rows()
        moved = (move.spec.path for move, moving in zip(self._moves, self._is_moving, strict=True) if moving)
        return Resharded(tuple(moved), self._sent_bytes, self._peak_bytes)

    def _give_states(self, number: int, move: TableMove) -> None:
        table = self._table(number)
        names = [entry.name for entry in move.values.own_states]
        assert move.values.optimizer is not None  # asked before
        states = [
            {
                **deepcopy(dict(move.values.plain)),
                **{name: move.targets[place_of(local.block)][name] for name in names},
            }
            for local in table.state.local
        ]
        self.users.take(table, move.values.optimizer, states)

    def _handed(self, owner: _Module) -> Callable[[KernelGroup, Any], Lookup]:
        """The builder that gives the groups of the final engine the lookups that rows have come to."""
        numbers = iter(range(len(owner.unbuilt.groups)))

        def handed(group: KernelGroup, device: Any) -> Lookup:
            number = next(numbers)
            assert _is_same_group(group, owner.unbuilt.groups[number])  # both follow from one plan
            return self._lookup(owner, number)

        return handed
