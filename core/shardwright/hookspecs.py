"""All that a plugin can hook into: one hook and one row for each kind of thing, and nothing else.

A plugin is a module named by an entry point of the group `shardwright`. It implements any of these hooks,
marked with `shardwright.hookimpl`. Each hook is called once in a process, when the first thing of any kind is
asked for; what it returns is kept, and called directly from then on: there is no hook call in planning or in
a training step.

Every hook takes no argument and returns a list or tuple of what the plugin offers: subclasses of the contract
(`shardwright.contracts`), or instances of one, each with a `name` of its own. A hook must return quickly and
the same on every rank: heavy imports and probing of devices belong inside the methods of what is offered. A
hook that raises, or returns anything else, takes its whole plugin out, and no other.

Example:
    >>> import shardwright as sw
    >>> class LastRank(sw.ShardingType):
    ...     name, abbreviation = "last_rank", "LR"
    ...     def layouts(self, table, topology, constraints):
    ...         yield sw.Layout([sw.Block(table.all_rows, table.all_columns, rank=topology.world_size - 1)])
    >>> @sw.hookimpl
    ... def shardwright_sharding_types():
    ...     return [LastRank]
    >>> shardwright_sharding_types()[0].name
    'last_rank'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pluggy

from shardwright.contracts import (
    Codec,
    CommBackend,
    ComputeKernel,
    Estimator,
    Extension,
    Optimizer,
    Partitioner,
    Proposer,
    ShardingType,
)
from shardwright.host.offers import Kind

hookspec = pluggy.HookspecMarker("shardwright")
hookimpl = pluggy.HookimplMarker("shardwright")


@hookspec
def shardwright_sharding_types() -> Sequence[type[ShardingType] | ShardingType]:  # type: ignore[empty-body]
    """Offer sharding types: ways to cut a table into blocks and to bring ids to them and results home.

    Implement it for a new layout, row map or dataflow. The planner then offers the type for each table that
    its `layouts` accepts, and runtime, checkpoint and report follow from the layout.
    """


@hookspec
def shardwright_proposers() -> Sequence[type[Proposer] | Proposer]:  # type: ignore[empty-body]
    """Offer proposers: searches over the choice of one sharding option per table.

    Implement it for a new search. The planner asks a proposer for proposals and tells it what became of each.
    """


@hookspec
def shardwright_estimators() -> Sequence[type[Estimator] | Estimator]:  # type: ignore[empty-body]
    """Offer estimators: models of how long a shard takes, or of how much memory it needs.

    Implement it for hardware, kernels or links that the built-in cost model does not describe. An estimator
    sees the shards of all options as columns and returns columns.
    """


@hookspec
def shardwright_partitioners() -> Sequence[type[Partitioner] | Partitioner]:  # type: ignore[empty-body]
    """Offer partitioners: ways to place the shards of a proposal on ranks.

    Implement it for a new balance. A partitioner returns the placement, or which shard did not fit where, and
    why.
    """


@hookspec
def shardwright_compute_kernels() -> Sequence[type[ComputeKernel] | ComputeKernel]:  # type: ignore[empty-body]
    """Offer compute kernels: lookups over the blocks of one rank, with or without the optimizer inside.

    Implement it for a new device, cache, precision or optimizer. Kernels declare what they support, so that
    the planner and the runtime find them by what is needed and not by name.
    """


@hookspec
def shardwright_optimizers() -> Sequence[type[Optimizer] | Optimizer]:  # type: ignore[empty-body]
    """Offer optimizers of embedding rows: their states, and the update of a row as array code.

    Implement it for a new optimizer. Every kernel that runs registered optimizers trains with it, under every sharding
    type; memory, state dicts and checkpoints follow.
    """


@hookspec
def shardwright_comm_backends() -> Sequence[type[CommBackend] | CommBackend]:  # type: ignore[empty-body]
    """Offer comm backends: the collectives of one communication library.

    Implement it for a new library or transport. A backend names the devices it serves; autograd over its
    collectives is written once, in core.
    """


@hookspec
def shardwright_codecs() -> Sequence[type[Codec] | Codec]:  # type: ignore[empty-body]
    """Offer codecs, which compress vectors that are sent between ranks.

    Implement it for a new precision or compression of pooled outputs, sequence outputs and their gradients. A codec
    is independent of the comm backend, which moves its bytes; users choose it for all tables or for one, by name.
    """


@hookspec
def shardwright_extensions() -> Sequence[type[Extension] | Extension]:  # type: ignore[empty-body]
    """Offer extensions: what a plugin adds beside planning and training.

    Implement it for a tool that users of a plugin run beside `shardwright plan`, or for any other point that
    `shardwright docs extension` lists. What an extension needs is imported when it is used.
    """


KINDS: Final[tuple[Kind[Any], ...]] = (
    Kind(
        "sharding_type",
        hook="shardwright_sharding_types",
        contract=ShardingType,
        kit="sharding_types.ShardingTypeTests",
        template="sharding_type",
        page="sharding_type.md",
    ),
    Kind(
        "proposer",
        hook="shardwright_proposers",
        contract=Proposer,
        kit="proposers.ProposerTests",
        template="proposer",
        page="proposer.md",
    ),
    Kind(
        "estimator",
        hook="shardwright_estimators",
        contract=Estimator,
        kit="estimators.EstimatorTests",
        template="estimator",
        page="estimator.md",
    ),
    Kind(
        "partitioner",
        hook="shardwright_partitioners",
        contract=Partitioner,
        kit="partitioners.PartitionerTests",
        template="partitioner",
        page="partitioner.md",
    ),
    Kind(
        "compute_kernel",
        hook="shardwright_compute_kernels",
        contract=ComputeKernel,
        kit="compute_kernels.ComputeKernelTests",
        template="compute_kernel",
        page="compute_kernel.md",
    ),
    Kind(
        "optimizer",
        hook="shardwright_optimizers",
        contract=Optimizer,
        kit="optimizers.OptimizerTests",
        template="optimizer",
        page="optimizer.md",
    ),
    Kind(
        "comm_backend",
        hook="shardwright_comm_backends",
        contract=CommBackend,
        kit="comm_backends.CommBackendTests",
        template="comm_backend",
        page="comm_backend.md",
    ),
    Kind(
        "codec",
        hook="shardwright_codecs",
        contract=Codec,
        kit="codecs.CodecTests",
        template="codec",
        page="codec.md",
    ),
    Kind(
        "extension",
        hook="shardwright_extensions",
        contract=Extension,
        kit="extensions.ExtensionTests",
        template="extension",
        page="extension.md",
    ),
)
"""The kinds, in the order of the documentation: one row each, from which everything else derives."""
