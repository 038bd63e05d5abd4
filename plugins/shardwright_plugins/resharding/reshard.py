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
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from attrs import define, evolve, field
from torch.optim import Optimizer

from shardwright.contracts.extension import Resharded
from shardwright.contracts.lookup import Lookup
from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.text import bytes_text
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.collections.sharded_collection import engine_of
from shardwright.runtime.sharded.collections.sharded_module import check_plan_covers
from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel
from shardwright.runtime.step.kernel_groups import (
    KernelGroup,
    build_lookup,
    check_layout,
    is_updated_in_backward,
)
from shardwright_plugins.plan_differences.layout_moves import Flow
from shardwright_plugins.resharding.blocks import (
    LookupId,
    ModuleMove,
    TableMove,
    TableValues,
    agreed_values,
    describe_values,
    lookup_values,
    new_states,
    place_of,
    values_of,
)
from shardwright_plugins.resharding.checks import (
    Asked,
    changes,
    check_change,
    check_optimizer,
    check_rows_can_move,
    modules_under,
)
from shardwright_plugins.resharding.exchange import RowExchange
from shardwright_plugins.resharding.keyed import copy_rows, exchange_keys
from shardwright_plugins.resharding.users import UserOptimizers

PIECE_BYTES = 64 << 20
"""Most that a rank sends or receives at once, unless asked otherwise."""
_BUFFERS = 3  # pieces in memory at once: what is sent, what is received, and what is cut out of a table


def reshard_model(
    model: DistributedModelParallel,
    plan: ShardingPlan,
    optimizers: Sequence[Optimizer],
    *,
    max_extra_bytes: int | None,
    piece_bytes: int | None,
) -> Resharded:
    """Take a model to another plan; see :meth:`DistributedModelParallel.reshard`."""
    asked = modules_under(plan, model.sharded_modules)
    return reshard(asked, model.env, optimizers, max_extra_bytes=max_extra_bytes, piece_bytes=piece_bytes)


def reshard(
    asked: Asked,
    env: ShardingEnv,
    optimizers: Sequence[Optimizer],
    *,
    max_extra_bytes: int | None,
    piece_bytes: int | None,
) -> Resharded:
    """Go from one plan to another, collection by collection."""
    at_once = PIECE_BYTES if max_extra_bytes is None else min(PIECE_BYTES, max(max_extra_bytes // 8, 1))
    with env.everyone.together("reshard()"):
        resharding = _Resharding(env, UserOptimizers.of(optimizers), max_extra_bytes, piece_bytes or at_once)
        resharding.agree(asked)
        if not resharding.modules:
            return Resharded()
        peak_bytes = resharding.reckon()
        env.everyone.agree("reckoning the memory of a resharding")
        sent_bytes = resharding.move()
        env.everyone.agree("the end of reshard(), when all rows have come")
    resharding.hand_over()
    moved = tuple(move.spec.path for move in resharding.moves if move.is_moving)
    return Resharded(moved, sent_bytes, peak_bytes)


def _order(move: TableMove) -> tuple[bool, str, bool, int, str]:
    """Those that stay on their ranks first; tables of one kernel and width share lookups, which are freed together."""
    old, spec = move.old, move.spec
    return move.is_moving, old.compute_kernel, old.layout.is_replicated, spec.embedding_dim, spec.path


def _give_back() -> None:
    """Have the C library give freed memory back to the system, where it can be asked to.

    glibc keeps pieces below 32 MiB, so that old blocks would still count as the process's: of 0.5 GiB in 12 tables on 2
    ranks, 253 MiB beside what was there instead of 57 MiB, for ``max_extra_bytes`` of 77 MiB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@define(eq=False)
class _Resharding:
    """A resharding on one rank.

    Args:
        env: the ranks.
        users: the user's optimizers.
        max_extra_bytes: most memory to take beside; ``None``: no limit, and nothing is freed before the end.
        piece_bytes: most that a rank sends or receives at once.

    Attributes:
        modules: those whose plan changes.
        moves: their tables, in the order in which they move.
    """

    env: ShardingEnv
    users: UserOptimizers
    max_extra_bytes: int | None
    piece_bytes: int
    modules: list[ModuleMove] = field(factory=list, init=False)
    moves: list[TableMove] = field(factory=list, init=False)
    _built: dict[LookupId, Lookup] = field(factory=dict, init=False)
    _old: dict[LookupId, Lookup] = field(factory=dict, init=False)
    _last: dict[LookupId, TableMove] = field(factory=dict, init=False)

    # 1. Plans

    def agree(self, asked: Asked) -> None:
        """Find what changes.

        Raises:
            ShardwrightError: this rank has a reason against it.
            DistributedError: the ranks were given different plans, or numbers of optimizers.
        """
        if self.max_extra_bytes is not None and self.max_extra_bytes < 1:
            raise InvalidInputError(f"max_extra_bytes must be 1 at least, got {self.max_extra_bytes}")
        stated: dict[str, Any] = {"the number of optimizers": len(self.users.leaves)}
        values: dict[str, TableValues | None] = {}
        for path, (module, params) in asked.items():
            check_plan_covers(module.inputs.specs, params, path)
            for spec in module.inputs.specs:
                check_layout(spec, params[spec.name], self.env.world_size)
                kind, digest = params[spec.name].sharding_type, hashlib.sha256(params[spec.name].digest())
                stated[f"the plan of table {spec.path!r}"] = f"{kind} {digest.hexdigest()[:12]}"
            if changes(module, params):
                inputs = evolve(module.inputs, params=dict(params))
                self.modules.append(ModuleMove(len(self.modules), module, inputs))
                values |= self._checked(path, self.modules[-1])
        everyone = self.env.everyone
        everyone.agree("the arguments of reshard()", stated, "Give every rank the same plan and optimizers")
        told = everyone.communicator.all_gather_objects(values)
        group = [told[rank] for rank in self.env.ranks_of_all]
        for owner in self.modules:
            for spec in owner.inputs.specs:
                table = owner.module.sharded_tables[spec.name]
                said = agreed_values(spec, [other[spec.path] for other in group])
                move = TableMove(owner, spec, said, table.state.sharding, table.state.local)
                if not spec.is_frozen and not is_updated_in_backward(spec, move.old):
                    check_optimizer(spec, said)
                self.moves.append(move)
        self.moves.sort(key=_order)

    def _checked(self, path: str, owner: ModuleMove) -> dict[str, TableValues | None]:
        """Check that a module can change; describe this rank's values of each table, ``None`` without a block here."""
        values: dict[str, TableValues | None] = {}
        reason = owner.module.engine.unfinished()
        if reason:
            raise UnsupportedError(f"the module at {path!r} cannot be resharded now: {reason}")
        for spec in owner.inputs.specs:
            table = owner.module.sharded_tables[spec.name]
            if not table.state.is_float:
                raise UnsupportedError(
                    f"table {spec.describe()}: rows of {table.state.row_format.name} do not move between plans: shard "
                    "the unsharded model by the new one"
                )
            check_change(spec, table.state.sharding, owner.inputs.params[spec.name])
            holder = self.users.holder_of(table)
            values[spec.path] = describe_values(table, self.users.states_of(table), holder)
        return values

    # 2. Memory

    def reckon(self) -> int:
        """Reckon the most memory that is there at a time beside what there was before, in bytes.

        Raises:
            UnsupportedError: a kernel cannot do what the plan asks, or a table cannot move.
            InvalidInputError: it takes more than ``max_extra_bytes`` on a rank.
        """
        self._last = {lookup: move for move in self.moves for lookup in move.leaving}
        extra = peak = 0
        built: set[LookupId] = set()
        for move in self.moves:
            if not move.is_kept:
                check_rows_can_move(move)
            owner, coming = move.owner, move.coming - built
            built |= coming
            extra += sum(_bytes_of(owner.unbuilt.groups[number]) for _, number in coming)
            extra += move.extra_bytes(move.after)
            piece = move.piece(self.piece_bytes)[1] if move.is_moving else 0
            peak = max(peak, extra + _BUFFERS * piece)
            if self.max_extra_bytes is not None:
                extra -= move.extra_bytes(move.before)
                groups = owner.module.engine.groups
                extra -= sum(_bytes_of(groups[number]) for _, number in self._left_by(move))
        if self.max_extra_bytes is not None and peak > self.max_extra_bytes:
            everyone = self.env.everyone
            raise InvalidInputError(
                f"rank {everyone.communicator.global_ranks[everyone.rank]} needs {bytes_text(peak)} beside "
                f"what it has to reshard; max_extra_bytes allows {bytes_text(self.max_extra_bytes)}. Blocks of one "
                "kernel group are allocated and freed together: allow more, change fewer tables at a time, or save a "
                "checkpoint and load it under the new plan"
            )
        return peak

    def _left_by(self, move: TableMove) -> list[LookupId]:
        """The old lookups that have nothing left to send once a table has moved."""
        return [lookup for lookup in move.leaving if self._last[lookup] is move]

    # 3. Rows

    def move(self) -> int:
        """Move rows; returns the bytes that this rank sent."""
        for owner in self.modules:
            for number, lookup in enumerate(owner.module.engine.lookups):
                self._old[owner.number, number] = lookup
        for move in self.moves:
            self._find_sources(move)
        if self.max_extra_bytes is not None:
            self._forget_old_parameters()
            for owner in self.modules:  # nobody but this holds the old blocks then
                owner.module.take_over(owner.inputs, owner.unbuilt)
        exchange = RowExchange(self.env)
        for move in self.moves:
            self._make_room(move)
            if move.is_moving:
                self._move_rows(move, exchange)
            else:
                self._copy_here(move)
            self._end(move)
        return exchange.sent_bytes

    def _find_sources(self, move: TableMove) -> None:
        table = move.table
        for local, state in zip(move.before, self.users.states_of(table), strict=True):
            place = place_of(local.block)
            move.sources[place] = values_of(table, local, state)
            if move.is_keyed:
                move.row_states[place] = table.index_of(local).state()

    def _forget_old_parameters(self) -> None:
        for move in self.moves:
            if move.values.optimizer is not None and not move.is_kept:
                self.users.forget(move.table, move.values.optimizer)

    def _make_room(self, move: TableMove) -> None:
        """Allocate a table's new blocks, unless other tables' have them."""
        for local in move.after:
            lookup, place = self._lookup(move.owner, local.lookup), place_of(local.block)
            if local.lookup in move.owner.kept:
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

    def _move_rows(self, move: TableMove, exchange: RowExchange) -> None:
        flows: list[Flow] = list(move.layouts.flows(self.env.rank))
        if move.is_keyed:
            targets = {
                place_of(local.block): (self._lookup(move.owner, local.lookup), local.index)
                for local in move.after
                if local.lookup not in move.owner.kept
            }
            move.keyed = exchange_keys(self.env, move, flows, targets)
        rows, _ = move.piece(self.piece_bytes)
        for start in range(0, move.layouts.longest, rows):
            exchange.make(move, flows, start, start + rows)

    def _lookup(self, owner: ModuleMove, number: int) -> Lookup:
        """A lookup of the new plan: one that stays, or one allocated when it is first asked for."""
        key = owner.number, number
        if key not in self._built:
            self._built[key] = (
                self._old[owner.number, owner.kept[number]]
                if number in owner.kept
                else build_lookup(owner.unbuilt.groups[number], owner.inputs.device)
            )
        return self._built[key]

    def _end(self, move: TableMove) -> None:
        """A table's rows have come."""
        if move.values.step is not None:
            for local in move.after:
                self._lookup(move.owner, local.lookup).load_step(move.values.step)
        if self.max_extra_bytes is not None:
            move.sources.clear()
            move.row_states.clear()
            freed = self._left_by(move)
            for lookup in freed:
                del self._old[lookup]
            if freed:
                _give_back()

    def _copy_here(self, move: TableMove) -> None:
        """Copy a table's blocks that stay on this rank, where their lookups are new."""
        for local in move.after:
            if local.lookup in move.owner.kept:
                continue
            if move.is_keyed:
                copy_rows(move, local.block, self._lookup(move.owner, local.lookup), local.index)
                continue
            place = place_of(local.block)
            for name, value in move.sources[place].items():
                move.targets[place][name].copy_(value)

    # 4. What goes on

    def hand_over(self) -> None:
        """Have modules and the user's optimizers go on with the new blocks; no rank waits for another."""
        if self.max_extra_bytes is None:
            self._forget_old_parameters()
        for owner in self.modules:
            engine = engine_of(owner.inputs, owner.module.engine, self._handed(owner))
            owner.module.take_over(owner.inputs, engine)
        for move in self.moves:
            if move.values.optimizer is not None and not move.is_kept:
                plain, own = move.values.plain, move.values.own_states
                places = [place_of(local.block) for local in move.after]
                states = [
                    {
                        **deepcopy(dict(plain)),
                        **{entry.name: move.targets[place][entry.name] for entry in own},
                    }
                    for place in places
                ]
                self.users.take(move.table, move.values.optimizer, states)
            if move.is_keyed and not move.is_kept:
                move.table.forget_loaded_rows()

    def _handed(self, owner: ModuleMove) -> Callable[[KernelGroup, Any], Lookup]:
        """The builder that gives the groups of the final engine the lookups that rows have come to."""
        numbers = iter(range(len(owner.unbuilt.groups)))
        return lambda group, device: self._lookup(owner, next(numbers))


def _bytes_of(group: KernelGroup) -> int:
    """Bytes of a group's blocks, in whatever memory."""
    return sum(
        sum(group.kernel.memory_bytes(spec.request, spec.block.num_rows).values()) for spec in group.blocks
    )
