"""Module sharders, their registry, and the collections that they find in a model."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from types import GenericAlias
from typing import Any, ClassVar

import torch
from torch import nn

from shardwright.arguments import brief, checked, checked_only
from shardwright.errors import (
    InvalidInputError,
    UnknownPluginError,
    UnsupportedError,
    nearest,
)
from shardwright.host.plugin_host import host
from shardwright.host.registry import Registry
from shardwright.modules.table_collection import TableCollection
from shardwright.optim.fused import optimizer_spec_of
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.caching import CacheParams
from shardwright.planning.tables.codecs import QCommsConfig, as_qcomms
from shardwright.planning.tables.optimizers import OptimizerSpec, max_gradient_of
from shardwright.planning.tables.spec import TableSpec, Update
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.batches.inputs import InputChecks


class ModuleSharder(ABC):
    """The sharder of one class of modules.

    A sharder serves its ``module_type`` and the subclasses of it that have no sharder of their own.

    Args:
        fused_params: the optimizer of the module's tables (see :class:`OptimizerSpec`); SGD at 0.01 by default, as in
            FBGEMM. Tables whose parameters went through ``apply_optimizer_in_backward`` keep that one. Also the
            cache of tables that are kept in host memory (``cache_load_factor``, ``cache_algorithm``), and
            ``max_gradient``: elements of the gradients of outputs, averaged over the ranks, are clipped to it.
        qcomm_codecs_registry: the codecs that results and gradients of the module's tables travel by, under TorchRec's
            name: a ``QCommsConfig``; float32 as they are by default.
            ``ParameterConstraints(qcomms_config=...)`` and a plan that has codecs of its own prevail.
        input_checks: level of checks of each batch: ``"off"``, ``"standard"``, ``"strict"``, ``"warning"`` or
            ``"ignore"`` (see :class:`InputChecks`); by default that of the variable ``SHARDWRIGHT_INPUT_CHECKS``, else
            the standard.
        update: time at which optimizers inside kernels update tables. ``"in_backward"``: in each backward pass, the
            fastest. ``"in_step"``: in ``optimizer.step()`` of the fused optimizer, by the sum of the gradients since
            ``zero_grad()``, so that they can be accumulated, scaled and clipped.

    Attributes:
        sync_module_states: copy rank 0's weights to the ranks whose modules have others; else they are an error.

    Raises:
        InvalidInputError: the optimizer or the codecs are of the wrong form, or there are no such checks.
        UnknownPluginError: a codec is not known; the text has the nearest.
    """

    module_type: ClassVar[type[nn.Module]]
    update: Update = "in_backward"
    max_gradient: float | None = None
    sync_module_states: bool = False
    # TorchRec's is generic over the module: ``cast(ModuleSharder[nn.Module], ...)`` is in its tutorials.
    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

    @checked_only("fused_params", "qcomm_codecs_registry", "input_checks", "update")
    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: QCommsConfig | Mapping[str, Any] | None = None,
        *,
        input_checks: str | None = None,
        update: Update = "in_backward",
    ) -> None:
        self.fused_params = dict(fused_params) if fused_params is not None else None
        self.optimizer = OptimizerSpec.from_fused_params(fused_params)
        codecs = as_qcomms(qcomm_codecs_registry)
        self.qcomm_codecs_registry = None if codecs is None else codecs.resolved()
        self.input_checks = InputChecks.of(input_checks)
        self.cache = CacheParams.from_fused_params(fused_params)
        self.max_gradient = max_gradient_of(fused_params)
        self.update = update

    @checked
    def updating(self, update: Update) -> ModuleSharder:
        """The same sharder with another time of updates, ``"in_backward"`` or ``"in_step"``."""
        other = copy(self)
        other.update = update
        return other

    def syncing_module_states(self) -> ModuleSharder:
        """The same sharder, which copies rank 0's weights to ranks that have others."""
        other = copy(self)
        other.sync_module_states = True
        return other

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Names of the sharding types that planners may choose for its modules' tables: by default all that are loaded.

        A subclass may return others; constraints then choose among these.

        Args:
            compute_device_type: ``"cpu"``, ``"cuda"``, ...
        """
        return list(host().sharding_types)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Names of the compute kernels that planners may choose with a sharding type.

        By default all that are loaded and run an optimizer in the backward pass. A subclass may return others;
        constraints then choose among these.
        """
        kernels = host().compute_kernels
        return [name for name in kernels if kernels[name].fuses_optimizer]

    def allowed(
        self, table: TableSpec, compute_device_type: str
    ) -> Mapping[str, Sequence[str] | None] | None:
        """Sharding types that planners may choose for a table, each with its compute kernels.

        By default those of :meth:`sharding_types` and :meth:`compute_kernels`, where a subclass overrides one of them.
        A subclass whose answer depends on the table overrides this.

        Args:
            table: one of :meth:`tables`.
            compute_device_type: ``"cpu"``, ``"cuda"``, ...

        Returns:
            Names of compute kernels by name of sharding type; ``None`` in place of a list, or of all, for any.

        Raises:
            UnknownPluginError: the subclass returns something that is not known.
        """
        return _allowed_by(self, compute_device_type)

    @abstractmethod
    def tables(self, module: nn.Module, path: str = "") -> list[TableSpec]:
        """The specifications of the tables of ``module``, which stands at ``path`` in the model.

        An empty list leaves the module out of plans; :meth:`shard` is called all the same.
        """

    @abstractmethod
    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """The sharded module; every rank of ``env`` makes this call.

        An attribute ``fused_optimizer`` of it, a ``KeyedOptimizer``, becomes a part of the model's.

        Args:
            module: the unsharded one; its weights are taken over, or initialised if they are on ``meta``.
            params: table name -> its part of the plan; empty without tables.
            env: the ranks.
            device: device of this rank's blocks; the environment's device by default.
            module_fqn: path of the module in the model.
        """


class LeaveAlone(ModuleSharder):
    """Leaves modules as they are: they stay in the model's dense part, or in the care of another library.

    Tables inside are neither planned nor sharded. Their parameters are dense ones: every rank has the whole of them,
    and ``DistributedDataParallel`` averages their gradients. It goes before all other sharders.

    Args:
        module: the module that is left alone, or a class: all modules of it are.

    Raises:
        InvalidInputError: it is neither.

    Example:
        >>> import shardwright as sw
        >>> from torch import nn
        >>> bags = lambda name: sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(9, 8, name, feature_names=[name])])
        >>> parts = {"item": bags("item"), "day": bags("day")}
        >>> sharders = [sw.LeaveAlone(parts["day"]), sw.EmbeddingBagCollectionSharder()]
        >>> env = sw.ShardingEnv.local(device_type="cpu")
        >>> list(sw.DistributedModelParallel(nn.ModuleDict(parts), env=env, sharders=sharders).sharded_modules)
        ['item']
    """

    def __init__(self, module: nn.Module | type[nn.Module]) -> None:
        super().__init__()
        self.module_type = module if isinstance(module, type) else type(module)  # type: ignore[misc]
        if not issubclass(self.module_type, nn.Module):
            raise InvalidInputError(f"LeaveAlone takes a module or a class of modules, got {brief(module)}")
        self._module = module

    def leaves(self, module: nn.Module) -> bool:
        """True if ``module`` is to be left alone."""
        return isinstance(module, self._module) if isinstance(self._module, type) else module is self._module

    def tables(self, module: nn.Module, path: str = "") -> list[TableSpec]:
        """None: nothing is planned."""
        return []

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """The module as it is."""
        return module


def find_sharder(module: nn.Module, sharders: Iterable[ModuleSharder]) -> ModuleSharder | None:
    """The sharder for ``module``: that of its class, or of the nearest base class along its MRO."""
    by_type = {sharder.module_type: sharder for sharder in sharders if not isinstance(sharder, LeaveAlone)}
    return next((by_type[cls] for cls in type(module).__mro__ if cls in by_type), None)


def shardable_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder]
) -> Iterator[tuple[str, nn.Module, ModuleSharder]]:
    """Each collection in ``module`` (itself included) with its path and sharder; not those inside another.

    Raises:
        UnsupportedError: a collection of tables that no sharder in the list serves.
    """
    _check_sharders(module, sharders)
    alone = [sharder for sharder in sharders if isinstance(sharder, LeaveAlone)]
    found: list[str] = []
    for path, child in module.named_modules():
        if any(not outer or path.startswith(outer + ".") for outer in found):
            continue
        sharder = find_sharder(child, sharders)
        if any(each.leaves(child) for each in alone):
            found.append(path)
        elif sharder is not None:
            found.append(path)
            yield path, child, sharder
        elif isinstance(child, TableCollection):
            served = ", ".join(sorted(s.module_type.__name__ for s in sharders)) or "nothing"
            raise UnsupportedError(
                f"no sharder for {type(child).__name__} at {path or 'the root of the model'!r}; the sharders given "
                f"serve {served}. Pass one whose module_type is it or a base class of it, or replace the module."
            )


def _check_sharders(module: Any, sharders: Any) -> None:
    if not isinstance(module, nn.Module):
        raise InvalidInputError(f"module must be a torch.nn.Module, got {brief(module)}")
    if not isinstance(sharders, Sequence) or isinstance(sharders, str):
        raise InvalidInputError(f"sharders must be a list of ModuleSharders, got {brief(sharders)}")
    for index, sharder in enumerate(sharders):
        if not isinstance(sharder, ModuleSharder):
            hint = f"; an object is needed: {sharder.__name__}()" if isinstance(sharder, type) else ""
            raise InvalidInputError(f"sharders[{index}] must be a ModuleSharder, got {brief(sharder)}{hint}")


def _allowed_by(sharder: ModuleSharder, device: str) -> dict[str, list[str] | None] | None:
    """Sharding types that a sharder allows planners to choose, each with kernels; ``None`` if it overrides nothing.

    Raises:
        UnknownPluginError: it allows something that is not known.
    """
    own = type(sharder)
    limits_types = own.sharding_types is not ModuleSharder.sharding_types
    limits_kernels = own.compute_kernels is not ModuleSharder.compute_kernels
    if not (limits_types or limits_kernels):
        return None
    types = _known(sharder, "sharding_types", host().sharding_types, device)
    if not limits_kernels:
        return dict.fromkeys(types)
    return {name: _known(sharder, "compute_kernels", host().compute_kernels, name, device) for name in types}


def _known(sharder: ModuleSharder, method: str, registry: Registry[Any], *arguments: str) -> list[str]:
    """The names that a sharder's method returns, without aliases."""
    asked = f"{type(sharder).__name__}.{method}({', '.join(map(repr, arguments))})"
    names = getattr(sharder, method)(*arguments)
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidInputError(f"{asked} must return a list of names, it returned {names!r}")
    try:
        return [registry.canonical(name) for name in names]
    except UnknownPluginError as error:
        raise UnknownPluginError(f"{asked} returned a name that is not known: {error}") from error


def check_plan_covers(
    tables: Sequence[TableSpec], params: Mapping[str, ParameterSharding], path: str
) -> None:
    """Check that a module's plan names its tables, all of them and no others.

    Raises:
        InvalidInputError: naming the table and the nearest known.
    """
    names = [table.name for table in tables]
    where = f"the plan of module {path!r}"
    for name in params:
        if name not in names:
            raise InvalidInputError(
                f"{where} names the table {name!r}, which it does not have.{nearest(name, names)}"
            )
    missing = [name for name in names if name not in params]
    if missing:
        raise InvalidInputError(
            f"{where} leaves out {len(missing)} of {len(names)} tables: {', '.join(missing[:5])}"
        )


PLAN_ONCE = "Plan once, with collective_plan, and give every rank the same tables, plan and fused_params"


def digests_of(
    tables: Sequence[TableSpec], params: Mapping[str, ParameterSharding], local_world_size: int
) -> dict[str, str]:
    """Each table and how it is sharded, by name, with a hash of it all: a plan may leave tables out or name others."""
    specs = {spec.name: spec for spec in tables}
    digests = {"LOCAL_WORLD_SIZE": str(local_world_size)}
    for name in {**specs, **params}:
        spec, sharding = specs.get(name), params.get(name)
        known = f"{spec.describe()}, {spec.optimizer or 'no optimizer'}" if spec else "not in the model"
        planned, kind = (
            (b"", "not planned") if sharding is None else (sharding.digest(), sharding.sharding_type)
        )
        digest = hashlib.sha256(repr(spec).encode() + planned).hexdigest()
        digests[f"table {name!r}"] = f"{known}, {kind} {digest[:12]}"
    return digests


def spec_of(sharder: ModuleSharder, module: TableCollection, config: Any, path: str) -> TableSpec:
    """The specification of a table of a collection, with its optimizer; without one if it is frozen."""
    weight = module.table_weight(config.name)
    spec = TableSpec.from_config(
        config,
        module=path,
        is_weighted=module.is_weighted(),
        optimizer=(optimizer_spec_of(weight, config.name) or sharder.optimizer)
        if weight.requires_grad
        else None,
        qcomms_config=sharder.qcomm_codecs_registry,
        cache=sharder.cache,
        update=sharder.update,
        max_gradient=sharder.max_gradient,
    )
    return spec if weight.requires_grad else spec.served()
