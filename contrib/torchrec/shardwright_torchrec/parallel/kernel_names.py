"""TorchRec's name `fused`, of all compute kernels that keep rows in a device's memory and update them there.

Shardwright has several, with names of their own. Scripts ask for `fused`, and compare what plans say with it. Those
plans keep the kernel's own name beside, so that what was planned is what is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import attrs

import shardwright as sw
from shardwright.host import PluginHost, host

FUSED = "fused"
_OLD = "batched_"
"""Beginning that TorchRec's names of kernels once had; its tutorials still write `BATCHED_FUSED`."""


class _Names(type(sw.ComputeKernel)):  # type: ignore[misc]
    """Names of compute kernels, with those that TorchRec has dropped."""

    def __getattr__(cls, name: str) -> Any:
        return getattr(sw.ComputeKernel, name.removeprefix(_OLD.upper()))

    def __getitem__(cls, name: str) -> Any:
        return sw.ComputeKernel[name.removeprefix(_OLD.upper())]

    def __call__(cls, name: str) -> Any:
        return sw.ComputeKernel(name.removeprefix(_OLD))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, sw.ComputeKernel)


class EmbeddingComputeKernel(sw.ComputeKernel, metaclass=_Names):
    """The compute kernels by name, as TorchRec's enumeration has them."""


@attrs.frozen(repr=False, hash=False)
class NamedSharding(sw.ParameterSharding):
    """A table's sharding, whose compute kernel has the name that TorchRec gives it.

    Args:
        own_kernel: name of the kernel that was planned.
    """

    own_kernel: str = attrs.field(default="", kw_only=True)

    @classmethod
    def of(cls, sharding: sw.ParameterSharding) -> sw.ParameterSharding:
        """The sharding under TorchRec's name of its kernel; itself where that is the kernel's own."""
        own = sharding.compute_kernel
        if torchrec_name(own) == own:
            return sharding
        fields = {field.name: getattr(sharding, field.name) for field in attrs.fields(sw.ParameterSharding)}
        return cls(**{**fields, "compute_kernel": torchrec_name(own)}, own_kernel=own)

    @property
    def own(self) -> sw.ParameterSharding:
        """The sharding under the kernel's own name."""
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(sw.ParameterSharding)}
        return sw.ParameterSharding(**{**fields, "compute_kernel": self.own_kernel})


@attrs.frozen(hash=False)
class NamedPlan(sw.ShardingPlan):
    """A plan that says TorchRec's names of compute kernels; its document says their own."""

    def to_json(self) -> str:
        """The plan document."""
        return own_plan(self).to_json()


def fused_kernels() -> list[str]:
    """Names of the kernels that TorchRec calls `fused`, those that planners prefer first."""
    return _fused_kernels(host())


@lru_cache(maxsize=1)
def _fused_kernels(plugins: PluginHost) -> list[str]:
    kernels = plugins.compute_kernels
    some = sw.KernelRequest(
        "cpu",
        sw.DataType.FP32,
        embedding_dim=4,
        num_columns=4,
        optimizer=sw.OptimizerSpec("sgd", 0.1),
        on_this_machine=False,
    )
    trained = [some, attrs.evolve(some, device="cuda")]
    found = []
    for name in kernels.names:
        kernel = kernels.create(name)
        trains = any(kernel.supports(request) is True for request in trained)
        if trains and kernel.fuses_optimizer and not kernel.row_state:
            tiers = {tier for tier, size in kernel.memory_bytes(some, 1).items() if size}
            found += [name] if tiers == {"device"} else []
    return sorted(found, key=lambda name: -kernels.create(name).preference)


def torchrec_name(kernel: str) -> str:
    """TorchRec's name of a kernel; the kernel's own where TorchRec has none."""
    return FUSED if kernel in fused_kernels() else kernel


def all_fused(kernels: Iterable[str]) -> list[str]:
    """The kernels that are meant by names of which one may be `fused`."""
    given = [host().compute_kernels.canonical(name.removeprefix(_OLD)) for name in kernels]
    return list(dict.fromkeys([*given, *fused_kernels()])) if FUSED in given else given


def named(plan: sw.ShardingPlan, asked: Collection[str] = ()) -> sw.ShardingPlan:
    """A plan under TorchRec's names of compute kernels, but for those that were asked for by their own."""

    def name(sharding: sw.ParameterSharding) -> sw.ParameterSharding:
        return sharding if sharding.compute_kernel in asked else NamedSharding.of(sharding)

    return NamedPlan(_changed(plan, name), plan.document)


def own_plan(plan: sw.ShardingPlan) -> sw.ShardingPlan:
    """A plan under the kernels' own names."""
    return sw.ShardingPlan(_changed(plan, _own), plan.document)


def _own(sharding: sw.ParameterSharding) -> sw.ParameterSharding:
    return sharding.own if isinstance(sharding, NamedSharding) else sharding


def _changed(
    plan: sw.ShardingPlan, change: Callable[[sw.ParameterSharding], sw.ParameterSharding]
) -> dict[str, sw.EmbeddingModuleShardingPlan]:
    return {
        path: sw.EmbeddingModuleShardingPlan({name: change(sharding) for name, sharding in own.items()})
        for path, own in plan.plan.items()
    }


def own_shardings(
    params: Mapping[str, sw.ParameterSharding], tables: Iterable[sw.TableSpec]
) -> dict[str, sw.ParameterSharding]:
    """The shardings of a collection's tables under the kernels' own names.

    Where one says `fused` and no more, and FBGEMM's kernel of that name does not serve the table here, it is the kernel
    that planners prefer among those that do.
    """
    found = {name: _own(sharding) for name, sharding in params.items()}
    for table in tables:
        sharding = found.get(table.name)
        if sharding is not None and sharding.compute_kernel == FUSED:
            found[table.name] = attrs.evolve(sharding, compute_kernel=_serving(sharding, table))
    return found


def _serving(sharding: sw.ParameterSharding, table: sw.TableSpec) -> str:
    """The kernel for a table that is to have `fused`."""
    block = sharding.layout.blocks[0]
    assert block.rank is not None  # a plan's blocks have ranks
    request = sw.KernelRequest.of(
        table,
        block.num_columns,
        device=sharding.device_on(block.rank),
        on_this_machine=True,
        first_column=block.columns.start,
    )
    kernels = host().compute_kernels
    serving = [name for name in fused_kernels() if kernels.create(name).supports(request) is True]
    return FUSED if FUSED in serving or not serving else serving[0]
