"""``DistributedModelParallel``: the sharding of a model's collections, and the wrapping of the rest."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwright.arguments import check, checked, checked_only
from shardwright.contracts.comm_backend import CommBackend
from shardwright.contracts.extension import Resharded
from shardwright.errors import InvalidInputError, PlanError
from shardwright.host.extensions import ask_at, words_at
from shardwright.host.plugin_host import host
from shardwright.optim._keyed_state import full
from shardwright.optim.combined import CombinedOptimizer
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.spec import Update
from shardwright.planning.text import count_text
from shardwright.runtime.ranks.devices import has_accelerator, make_current, with_index
from shardwright.runtime.ranks.environment import ShardingEnv, device_of_rank, environment_of
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.collections.sharders import (
    ModuleSharder,
    collect_tables,
    default_sharders,
    replaced,
    warn_of_plain_tables,
)
from shardwright.runtime.sharded.tables.data_parallel import DefaultDataParallelWrapper, leave_out_tables
from shardwright.runtime.sharded.tables.initialization import initialise
from shardwright.runtime.step.step_events import step_listeners


class DistributedModelParallel(nn.Module):
    """A model whose embedding collections are sharded and whose rest is replicated.

    1. Every rank: the collections of ``module`` are found (nested ones too), and planned if no plan is given.
    2. Every rank: each is replaced by its sharded form; what is left on ``meta`` is allocated and initialised by
       ``reset_parameters``.
    3. The rest is wrapped in ``DistributedDataParallel``, which copies rank 0's values to all.

    Args:
        module: the model; changed in place.
        env: the ranks; the world's process group by default. ``ShardingEnv.local()`` is this process alone.
        device: this rank's device; the environment's by default. Without ``env``, its type is planned for; without a
            number, it is the current device, or that of ``LOCAL_RANK`` where no other was set. It becomes the current
            device of the process.
        plan: sharding plan of the model; made collectively by default.
        sharders: one for each class of collections in the model; the registered ones by default.
        init_data_parallel: wrap the rest now; else call :meth:`init_data_parallel` later, or leave it to a
            ``DistributedDataParallel`` around this model, as Accelerate and Lightning make it.
        comm_backend: comm backend of the tables' collectives, by name or as an object; by default the one with the name
            of the process group's own backend. Not with ``env``, which has one.
        data_parallel_wrapper: options of ``DistributedDataParallel`` around the rest.
        update: time at which the optimizers inside kernels update tables, ``"in_backward"`` or ``"in_step"`` (see
            :class:`ModuleSharder`), instead of what the sharders say.
        sync_module_states: copy rank 0's weights of tables to the ranks whose modules have others, in place, under the
            name that FSDP has for it; without it they are an error. The rest is copied from rank 0 in any case.

    Attributes:
        env: the ranks.
        plan: the sharding plan of the model.
        fused_optimizer: the optimizers that run in the backward pass, those of each sharded module under its path.
        device: this rank's device.
        sharded_modules: the sharded modules by their paths.

    Raises:
        UnsupportedError: a collection has no sharder, or a module on ``meta`` cannot be initialised.
        PlanError, InvalidInputError: the plan does not fit the model; naming module and table. Or ``env`` does not send
            from the device.
        DistributedError: the ranks' modules have different weights of a table; the same on every rank.

    Example:
        >>> import shardwright as sw
        >>> table = sw.EmbeddingBagConfig(
        ...     num_embeddings=1000, embedding_dim=8, name="user_id", feature_names=["user"]
        ... )
        >>> bags = sw.EmbeddingBagCollection([table], device="meta")  # nothing is allocated before it is sharded
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> batch = sw.KeyedJaggedTensor.from_lists({"user": [[7, 8], [], [9]]})
        >>> model(batch).values().sum().backward()  # updates the table
        >>> {name: list(value.shape) for name, value in model.state_dict().items()}
        {'embedding_bags.user_id.weight': [1000, 8]}
    """

    @checked_only("env", "device")
    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder] | None = None,
        init_data_parallel: bool = True,
        *,
        comm_backend: str | CommBackend | None = None,
        data_parallel_wrapper: DefaultDataParallelWrapper | None = None,
        update: Update | None = None,
        sync_module_states: bool = False,
    ) -> None:
        super().__init__()
        asked = None if device is None else torch.device(device)
        # Who asks for a device plans for it, whatever the process group could also carry.
        wanted = None if asked is None or asked.type == "meta" else asked.type
        if asked is not None and has_accelerator(asked.type):
            make_current(with_index(asked))  # which the environment connects
        self.env = environment_of(env, comm_backend=comm_backend, device_type=wanted)
        self.sharded_modules: dict[str, nn.Module] = {}
        # Beside the submodules, so that parameters keep the model's names (see _fqn_modifiers).
        self._wrapper: tuple[DistributedDataParallel, ...] = ()
        self._data_parallel = data_parallel_wrapper or DefaultDataParallelWrapper()
        with self.env.everyone.together("sharding the model"):
            self.device = device_of_rank(self.env, asked)
            make_current(self.device)
            self._build(module, plan, sharders, init_data_parallel, update, sync_module_states)
        # One object, since learning-rate schedulers mark the optimizer that they are given.
        self.fused_optimizer = CombinedOptimizer(
            [
                (path, sharded.fused_optimizer)  # type: ignore[misc]
                for path, sharded in self.sharded_modules.items()
                if hasattr(sharded, "fused_optimizer")
            ]
        )
        leave_out_tables(self)  # should somebody else wrap it
        self.register_load_state_dict_pre_hook(_find_inner_names)  # should it be inside another
        self.register_load_state_dict_post_hook(_show_outer_names)
        collections = [own for own in self.sharded_modules.values() if isinstance(own, ShardedCollection)]
        for listener in step_listeners():
            listener.has_model(self, [own.engine.events.collection for own in collections])

    @checked
    def _build(
        self,
        module: nn.Module,
        plan: ShardingPlan | None,
        sharders: Sequence[ModuleSharder] | None,
        init_data_parallel: bool,
        update: Update | None = None,
        sync_module_states: bool = False,
    ) -> None:
        given, sharders = sharders, default_sharders() if sharders is None else list(sharders)
        if update is not None:
            sharders = [sharder.updating(update) for sharder in sharders]
        if sync_module_states:
            sharders = [sharder.syncing_module_states() for sharder in sharders]
        if plan is None:
            from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner

            if collect_tables(module, sharders):
                plan = EmbeddingShardingPlanner().collective_plan(module, sharders, env=self.env)
            elif given is None:
                warn_of_plain_tables(module)
        self.plan = plan or ShardingPlan({})
        self.check_plan(self.plan)
        self._model = replaced(module, sharders, self.plan, self.env, self.device, self.sharded_modules)
        initialise(self._model, self.sharded_modules, self.env, self.device)
        if init_data_parallel:
            self.init_data_parallel()

    def init_data_parallel(self) -> None:
        """Wrap what is not sharded in ``DistributedDataParallel``, if it has parameters; done once.

        The extension ``method:dense_part`` does it.

        Raises:
            UnknownPluginError: it has parameters, and no plugin that wraps the dense part is loaded.
            DistributedError: it was wrapped on some ranks alone; on all.
        """
        if self._wrapper or self.env.everyone.process_group is None:
            return
        what, everyone, offered = "wrapping the dense part of the model", self.env.everyone, host().extensions
        with everyone.together(what):
            tables = leave_out_tables(self.module)
            given = (self.module, everyone, self.device, tables, self._data_parallel.options())
            # Where there is nothing to wrap, nobody need be there who would; who is there compares the ranks' models.
            is_asked = "dense_part" in words_at("method", offered) or any(
                name not in tables for name, _ in self.module.named_parameters()
            )
            wrapper = ask_at("method", "dense_part", offered, nn.Module | None, *given) if is_asked else None
            advice = "The plugin at 'method:dense_part' must wrap the dense part on every rank, or on none"
            everyone.agree(what, {"it is wrapped": wrapper is not None}, advice)
            self._wrapper = () if wrapper is None else (wrapper,)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which gradients of dense parameters add up without an average over the ranks.

        The backward pass of the first forward pass after it averages all of them. Gradients of tables travel in each
        backward pass. Every rank makes the same passes in it.

        Raises:
            UnsupportedError: a table is updated in the backward pass, which would not wait for the other batches.

        Example:
            >>> for micro_batch in micro_batches[:-1]:  # doctest: +SKIP
            ...     with model.no_sync():
            ...         (model(micro_batch).mean() / len(micro_batches)).backward()
            >>> (model(micro_batches[-1]).mean() / len(micro_batches)).backward()  # doctest: +SKIP
        """
        for sharded in self.sharded_modules.values():
            if isinstance(sharded, ShardedCollection):
                sharded.refuse_accumulation()
        return self._wrapper[0].no_sync() if self._wrapper else nullcontext()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; every rank makes this call in the same step."""
        outermost = self._wrapper[0] if self._wrapper else self._model
        return outermost(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The model with its sharded modules, without the data-parallel wrapper."""
        return self._model

    def reshard(
        self,
        plan: ShardingPlan,
        *optimizers: Optimizer,
        max_extra_bytes: int | None = None,
        piece_bytes: int | None = None,
    ) -> Resharded:
        """Go from one plan to another between two steps; every rank makes this call.

        Weights and optimizer states travel from their old owners to their new ones in pieces of bounded size. The
        fused optimizer stays the same object with the same learning rates, so that schedulers go on; training goes on
        as if nothing had happened. Whatever does not fit is refused on all ranks before anything moves. The extension
        ``method:reshard`` does it.

        Args:
            plan: the new plan, for the same model and ranks; the same for all sharding groups, where there are several,
                each of which moves its own replica.
            optimizers: those of your own that have parameters of tables, whose kernel shows gradients: they get the
                new parameters. Optimizers around them (combined, scheduled) follow.
            max_extra_bytes: most that a rank may take while rows move, beside what it has; then old blocks are freed as
                soon as their rows have left, and a failure in between loses the model. ``None``: old blocks stay until
                all rows have come, so that a failure changes nothing.
            piece_bytes: most that a rank sends or receives at once; 64 MiB by default, or an eighth of
                ``max_extra_bytes`` where that is less.

        Returns:
            Which tables moved, and the bytes; see :class:`Resharded`.

        Raises:
            PlanError, InvalidInputError: the plan does not fit the model, or needs more than ``max_extra_bytes``.
            UnsupportedError: a batch is in progress, or a table cannot move.
            DistributedError: ranks gave different plans, or one did not make this call, or was lost in it.
            UnknownPluginError: no plugin that reshards is loaded.

        Example:
            >>> import shardwright as sw
            >>> table = sw.EmbeddingBagConfig(
            ...     name="user_id", num_embeddings=1000, embedding_dim=8, feature_names=["user"]
            ... )
            >>> bags = sw.EmbeddingBagCollection([table], device="meta")
            >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
            >>> model.reshard(model.plan)
            Resharded(tables=(), sent_bytes=0, peak_bytes=0)
        """
        with self.env.everyone.together("resharding the model"):
            self.check_plan(plan)
            limits = {"max_extra_bytes": max_extra_bytes, "piece_bytes": piece_bytes}
            given = (self, plan, optimizers)
            resharded: Resharded = ask_at("method", "reshard", host().extensions, Resharded, *given, **limits)
            self.plan = plan  # here: a rank that is lost from now on leaves plan and blocks the new ones
            leave_out_tables(self)  # the new blocks, should somebody else wrap it
        return resharded

    def check_plan(self, plan: ShardingPlan) -> None:
        """Check that a plan that says for how many ranks it is, is for as many as there are.

        Raises:
            InvalidInputError: it is no plan.
            PlanError: it is for another number of ranks, or for one of several groups of another size.
        """
        check("plan", plan, ShardingPlan)
        topology = plan.document.get("topology", {})
        size, groups = topology.get("world_size"), topology.get("replicas", {}).get("num_groups", 1)
        if groups > 1 and size != self.env.world_size:
            raise PlanError(
                f"the plan is for {count_text(size, 'rank')} in each of {groups} sharding groups, and its tables would "
                f"be on {size} of these {self.env.world_size} ranks: shard the model over groups of as many, "
                "or plan with a Topology of all ranks without sharding_group()"
            )
        if size not in (None, self.env.world_size):
            raise PlanError(
                f"the plan is for {count_text(size, 'rank')}, and the model is on {self.env.world_size}: plan with a "
                "Topology of as many ranks as there are, or leave topology out"
            )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters; those of sharded tables are this rank's blocks.

        A table's first block here has the unsharded name, further ones ``..._1`` and so on. A rank with fewer blocks
        of a table that is trained has empty parameters in their place. Optimizer state made for these is per block as
        well.
        """
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Names, as in the unsharded model, and buffers."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Keys, shapes and dtypes of the unsharded model, in shared storage; no collective, and no copy.

        Over several ranks tables are sharded tensors (``DTensor`` to torch) of which a rank has its blocks.
        ``torch.distributed.checkpoint`` saves and loads them, under any plan and number of ranks. In one process
        they are plain.
        """
        return self.module.state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict with whole tensors, copies in host memory; a collective, every rank makes this call.

        ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` gives it too, to rank 0 alone where it is
        asked for ``full_state_dict`` and ``cpu_offload``.

        Raises:
            DistributedError: a rank does not make it within the time-out.

        Example:
            >>> import shardwright as sw
            >>> table = sw.EmbeddingBagConfig(
            ...     name="user_id", num_embeddings=1000, embedding_dim=8, feature_names=["user"]
            ... )
            >>> bags = sw.EmbeddingBagCollection([table], device="meta")
            >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
            >>> {name: list(value.shape) for name, value in model.full_state_dict().items()}
            {'embedding_bags.user_id.weight': [1000, 8]}
        """
        with self.env.everyone.together("full_state_dict()"):
            whole: dict[str, Any] = full(self.module.state_dict())
            return whole

    def unshard(self) -> nn.Module:
        """An unsharded copy of the model, its tables in host memory; a collective, every rank makes this call.

        For models that fit into one process, to serve or to look at.

        Raises:
            UnsupportedError: a table's ids are keys, which no unsharded module finds rows for.
        """
        whole = {
            id(sharded): sharded.unshard()
            for sharded in self.sharded_modules.values()
            if isinstance(sharded, ShardedCollection)
        }
        return copy.deepcopy(self.module, whole)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over the state of an unsharded or differently sharded model; every rank makes this call.

        Each rank takes its blocks of whole tables. Sharded tensors of another layout are gathered, one after another.

        Raises:
            InvalidInputError: dense parameters were to be replaced, while their gradients are averaged over the ranks.
            RuntimeError: the state does not fit, as torch says it.
            DistributedError: another rank failed, or does not make this call within the time-out.
        """
        with self.env.everyone.together("load_state_dict()"):
            if assign and self._wrapper:
                raise InvalidInputError(
                    "load_state_dict(assign=True) would replace dense parameters, and gradients of new ones would not "
                    "be averaged over the ranks: load with assign=False, which copies values; or build the model with "
                    "DistributedModelParallel(..., init_data_parallel=False), load, and call init_data_parallel()"
                )
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Map the model's own names to the attribute that they leave out, for ``torch.distributed.checkpoint``."""
        own = {**self._model._modules, **self._model._parameters, **self._model._buffers}
        return dict.fromkeys(own, "_model")


def _find_inner_names(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put the model's own attribute into the names of a state that is loaded into a module around it."""
    model._loaded_at = prefix
    for name in [own for own in state_dict if own.startswith(prefix)]:
        state_dict[f"{prefix}_model.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _show_outer_names(model: Any, keys: Any) -> None:
    """Leave the model's own attribute out of the names of keys that are missing or unexpected."""
    inner, outer = f"{model._loaded_at}_model.", model._loaded_at
    for names in keys:
        names[:] = [outer + name.removeprefix(inner) if name.startswith(inner) else name for name in names]
