"""TorchRec's proposers, and scripts' own in shardwright's planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

import shardwright as sw
from shardwright_torchrec.parallel.kernel_names import fused_kernels
from shardwright_torchrec.planner.columns import options_of, set_costs
from shardwright_torchrec.planner.types import Proposer, ShardingOption


class _OfPlanner(Proposer):
    """A proposer that runs inside the planner, which takes shardwright's of the same idea.

    Attributes:
        plugin: name of that proposer.
    """

    plugin: ClassVar[str]

    def load(self, *arguments: Any, **further: Any) -> Any:
        """Refuse, by name: nothing is searched beside a planner.

        Raises:
            UnsupportedError: always.
        """
        name = type(self).__name__
        how = (
            f"give it as EmbeddingShardingPlanner(proposer={name}()). A proposer"
            if type(self).__module__ == __name__
            else f"{name}, which changes one of these, cannot. One"
        )
        raise sw.UnsupportedError(
            f"TorchRec's proposers propose inside a planner: {how} whose proposals are to be seen derives from "
            "torchrec.distributed.planner.types.Proposer"
        )

    propose = feedback = load


class GreedyProposer(_OfPlanner):
    """Takes each table's fastest option first, then moves one table at a time on to its next option.

    Args:
        use_depth: not needed: options are tried in both orders.
        threshold: not needed: the search ends by itself.
    """

    plugin: ClassVar[str] = "greedy"

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None: ...


class UniformProposer(_OfPlanner):
    """Takes one sharding type for all tables, each in turn.

    Args:
        use_depth: not needed: options are tried in both orders.
    """

    plugin: ClassVar[str] = "uniform"

    def __init__(self, use_depth: bool = True) -> None: ...


class EmbeddingOffloadScaleupProposer(_OfPlanner):
    """Stands for plans whose caches of rows on the device grow until it is full.

    The planner that gets it plans with its other proposers, or as it does by default, and gives the memory that is left
    to the caches (`refinements=["scale_up_caches"]`).

    Args:
        use_depth: not needed.
    """

    def __init__(self, use_depth: bool = True) -> None: ...


class GridSearchProposer(_OfPlanner):
    """Takes every combination of the tables' options.

    Args:
        max_proposals: not needed: where there are more than 10 000, fewer options of each table are tried.
    """

    plugin: ClassVar[str] = "grid_search"

    def __init__(self, max_proposals: int = 10000) -> None: ...


class DynamicProgrammingProposer(_OfPlanner):
    """Looks for the fastest plan within memory by ``proving``, which needs no parts of memory for that.

    Args:
        hbm_bins_per_device: not needed.
    """

    plugin: ClassVar[str] = "proving"

    def __init__(self, hbm_bins_per_device: int = 100) -> None: ...


class OwnProposer(sw.Proposer):
    """A proposer that a script has written.

    Args:
        proposer: the script's.
    """

    name: ClassVar[str] = "own_proposer"

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer

    def proposals(self, space: sw.SearchSpace, watch: sw.Watch) -> sw.Proposals:
        """The script's proposals, with what became of them."""
        found = listed(space)
        tables = [option.fqn for own in found for option in own[:1]]
        self.proposer.load([option for own in found for option in own])
        while (proposal := self.proposer.propose()) is not None:
            chosen = {option.fqn: option.index for option in proposal}
            if set(chosen) != set(tables) or len(proposal) != len(tables) or min(chosen.values()) < 0:
                raise sw.PlanningError(
                    f"{type(self.proposer).__name__}.propose() must give one option of the search space for each of "
                    f"{len(tables)} tables, it gave {proposal!r}"
                )
            feedback = yield np.array([chosen[name] for name in tables], dtype=np.int64)
            fits = feedback.plan is not None
            self.proposer.feedback(fits, proposal, feedback.value_ms if fits else None, space.topology)


def listed(space: sw.SearchSpace, *, every: bool = False) -> list[list[ShardingOption]]:
    """The options of each of all tables, with their costs.

    Args:
        space: columns of all options.
        every: list all compute kernels that TorchRec calls `fused`; else the one that planners prefer.
    """
    options = space.options
    # Of ranks of unlike speed the mean over classes: TorchRec's options have one time.
    phases = {phase: column.reshape(len(column), -1).mean(axis=1) for phase, column in space.phases.items()}
    memory = {tier: space.memory_bytes[:, number] for number, tier in enumerate(space.tiers)}
    found = [
        options_of(options, table, number) for number, table in enumerate(options.distinct_table.tolist())
    ]
    for own in found:
        set_costs(own, options, phases, memory)
    return found if every else [_preferred(own) for own in found]


def _preferred(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """The options of a table, of those that TorchRec cannot tell apart the one whose kernel is preferred."""
    order = fused_kernels()
    found: dict[object, ShardingOption] = {}
    for option in options:
        cuts = tuple((tuple(shard.size), tuple(shard.offset)) for shard in option.shards)
        key = (option.sharding_type, option.compute_kernel, option.partition_by, cuts)
        other = found.setdefault(key, option)
        if option.own_kernel in order and order.index(option.own_kernel) < order.index(other.own_kernel):
            found[key] = option
    return list(found.values())
