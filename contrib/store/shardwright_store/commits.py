"""Commits of stores, in place, and the way back to them."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any

from attrs import frozen

import shardwright as sw
from shardwright_store.kernel import FOLDER_VARIABLE, LmdbCaching
from shardwright_store.rows import StoredRows
from shardwright_store.store import RowStore


@frozen(eq=False)
class _Kept:
    """A store of a model, and a block that is in it.

    Args:
        store: the store, to which the cache was just written.
        lookup: lookup of its blocks.
        index: number of one of them.
    """

    store: RowStore
    lookup: sw.Lookup
    index: int


def commit(model: sw.DistributedModelParallel, step: int) -> None:
    """Keep the rows of all stores of a model, with their optimizer state, as they are now; every rank makes this call.

    It costs as much as the rows that changed since the last one. Parameters outside of stores are not kept.

    Args:
        model: the model, between two steps.
        step: number of the training step, which :func:`restore` returns: the same on every rank. It may be lower than
            that of the last commit, as after a return to a checkpoint.

    Raises:
        InvalidInputError: the step is no such number, or no table is in a store. Nothing is committed then.
        DistributedError: another rank commits another step, in which case nothing is committed; or could not commit, or
            was lost. It is named.
    """
    env = _env_of(model)
    with env.together("committing the stores"):
        _check_step(step)
        env.agree("the arguments of commit()", {"step": int(step)}, "All ranks commit the same step")
        stores = list(_kept_of(model))
        _check_some(sum(env.communicator.all_gather_objects(len(stores))))
        for kept in stores:
            num_steps = kept.lookup.optimizer_state(kept.index).get("step")
            kept.store.commit(
                {"step": int(step), "num_steps": None if num_steps is None else float(num_steps)}
            )


def restore(model: sw.DistributedModelParallel) -> int:
    """Go back to the last commit, which another process may have made; every rank makes this call.

    The model must have the plan of then, and ``SHARDWRIGHT_STORE_FOLDER`` name the folder of then.

    Args:
        model: the model, between two steps.

    Returns:
        The step of the commit.

    Raises:
        InvalidInputError: nothing was committed, no table is in a store, or ranks were killed while they committed,
            so that some are ahead. Nothing is changed then.
    """
    env, stores = _env_of(model), list(_kept_of(model))
    steps = [(kept.store.committed or {}).get("step") for kept in stores]
    told = env.communicator.all_gather_objects(steps)
    found = {step for own in told for step in own}
    _check_some(len(found))
    if len(found) != 1 or None in found:
        why = "nothing was committed yet" if found == {None} else "none is common to all"
        if not all(kept.store.stays for kept in stores):
            why += f". {FOLDER_VARIABLE} is not set, so that each process begins with stores of its own"
        raise sw.InvalidInputError(
            f"the stores of ranks 0 to {len(told) - 1} were committed at the steps {told}: {why}. What was committed "
            "is restored under the plan of then; under any other, load a checkpoint that save_checkpoint() made, or "
            "train from the start"
        )
    for kept in stores:
        num_steps = kept.store.restore()["num_steps"]
        if num_steps is not None:
            kept.lookup.load_step(num_steps)
    return int(found.pop())


def _env_of(model: Any) -> sw.ShardingEnv:
    if not isinstance(model, sw.DistributedModelParallel):
        raise sw.InvalidInputError(
            f"model must be a DistributedModelParallel, got {type(model).__name__}", subject="model"
        )
    return model.env.everyone


def _check_step(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, Integral) or not 0 <= int(step) < 1 << 63:
        raise sw.InvalidInputError(
            f"step must be a whole number from 0 below 2**63, got {step!r}", subject="step", asked=step
        )


def _check_some(number: int) -> None:
    if not number:
        raise sw.InvalidInputError(
            "no table of the model is in a store: name the kernel in its constraints, "
            f"compute_kernels=[{LmdbCaching.name!r}]",
            subject="model",
        )


def _kept_of(model: sw.DistributedModelParallel) -> Iterator[_Kept]:
    """List the stores of a model on this rank; changed rows in caches are written to each before."""
    kinds = (sw.ShardedEmbeddingBagCollection, sw.ShardedEmbeddingCollection)
    seen: set[int] = set()
    for module in model.modules():
        tables: Any = module.sharded_tables.values() if isinstance(module, kinds) else ()
        for table in tables:
            for local in table.state.local:
                rows = table.weight_of(local)
                if isinstance(rows, StoredRows) and id(rows.store) not in seen:
                    seen.add(id(rows.store))
                    yield _Kept(rows.store, table.lookup_of(local), local.index)
