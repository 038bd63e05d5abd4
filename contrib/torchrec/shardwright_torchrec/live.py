"""The estimators `torchrec_live` and `torchrec_live_storage`: they ask the TorchRec that is installed.

Every option of every distinct table is handed to TorchRec's own estimators, shard by shard, as its planner would; what
comes back is put into columns. It is as slow as TorchRec, and right by definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

import shardwright as sw
from shardwright_torchrec.installed import torchrec_module

__all__ = ["TorchRecLive", "TorchRecLiveStorage"]

_PHASES = {
    "forward_compute": "fwd_compute",
    "forward_communication": "fwd_comms",
    "backward_compute": "bwd_compute",
    "backward_communication": "bwd_comms",
    "prefetch": "prefetch_compute",
}
"""Phases -> the fields of TorchRec's `Perf`."""


class TorchRecLive(sw.Estimator):
    """Time: what an installed TorchRec's `EmbeddingPerfEstimator` says."""

    name: ClassVar[str] = "torchrec_live"
    depends_on_shape_only: ClassVar[bool] = True

    def option_space(self, topology: sw.Topology) -> sw.OptionSpace:
        """The types and kernels that TorchRec's sharders offer on such devices; others must be named in constraints."""
        return _space(topology)

    def estimate(self, options: sw.Options, topology: sw.Topology) -> Mapping[str, np.ndarray]:
        """Milliseconds of each phase, ``[S]``."""
        estimated = _Asked.of(options, topology, "EmbeddingPerfEstimator")
        return {
            phase: estimated.column(lambda shard, field=field: getattr(shard.perf, field))
            for phase, field in _PHASES.items()
        }

    def provenance(self, options: sw.Options) -> Mapping[str, Any]:
        """Version of TorchRec."""
        return {"torchrec": getattr(torchrec_module("torchrec"), "__version__", "unknown")}


class TorchRecLiveStorage(sw.Estimator):
    """Memory: what an installed TorchRec's `EmbeddingStorageEstimator` says."""

    name: ClassVar[str] = "torchrec_live_storage"
    measures: ClassVar[str] = "storage"
    depends_on_shape_only: ClassVar[bool] = True

    def option_space(self, topology: sw.Topology) -> sw.OptionSpace:
        """Option space of :class:`TorchRecLive`."""
        return _space(topology)

    def estimate(self, options: sw.Options, topology: sw.Topology) -> Mapping[str, np.ndarray]:
        """Bytes of each memory tier, ``[S]``."""
        estimated = _Asked.of(options, topology, "EmbeddingStorageEstimator")
        return {
            tier: estimated.column(lambda shard, tier=tier: getattr(shard.storage, tier, 0))
            for tier in topology.tiers
        }


@attrs.frozen(eq=False)
class _Asked:
    """TorchRec's options, estimated, beside ours."""

    options: sw.Options
    estimated: tuple[Any, ...]

    @classmethod
    def of(cls, options: sw.Options, topology: sw.Topology, estimator: str) -> _Asked:
        """Let one of TorchRec's estimators estimate all options."""
        estimators = torchrec_module("torchrec.distributed.planner.shard_estimators")
        sharders = {_key(module): sharder for module, sharder in _sharders().items()}
        data = torchrec_module("torchrec.distributed.planner.utils").build_sharder_data_map(sharders)
        asked = tuple(_option(options, option) for option in range(options.num_options))
        getattr(estimators, estimator)(topology=_topology(topology)).estimate(list(asked), data)
        return cls(options, asked)

    def column(self, value: Callable[[Any], float]) -> np.ndarray:
        """A value of the first shard of each run: ``[S]``."""
        found = np.zeros(self.options.num_shards)
        for option, asked in enumerate(self.estimated):
            first = 0
            runs = self.options.shards_of(option)
            for run in range(runs.start, runs.stop):
                found[run] = value(asked.shards[first])
                first += int(self.options.count[run])
        return found


def _sharders() -> Mapping[type, Any]:
    """TorchRec's collections -> its sharders of them."""
    bags = torchrec_module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder()
    sequences = torchrec_module("torchrec.distributed.embedding").EmbeddingCollectionSharder()
    return {sharder.module_type: sharder for sharder in (bags, sequences)}


def _key(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _space(topology: sw.Topology) -> sw.OptionSpace:
    (bags, *_), device = _sharders().values(), topology.compute_device
    offered = set(bags.sharding_types(device))
    kernels = sw.host.host().compute_kernels
    return sw.OptionSpace(
        kernels={
            kind: tuple(name for name in bags.compute_kernels(kind, device) if name in kernels)
            if kind in offered
            else ()
            for kind in sw.host.host().sharding_types.names
        }
    )


def _topology(topology: sw.Topology) -> Any:
    """TorchRec's topology with our bandwidths."""
    links, speeds = topology.link_bandwidths, topology.memory_bandwidths
    given = {
        "hbm_mem_bw": speeds.get("hbm"),
        "ddr_mem_bw": speeds.get("ddr"),
        "hbm_to_ddr_mem_bw": links.get("hbm_to_ddr"),
        "intra_host_bw": links["intra_host"],
        "inter_host_bw": links["inter_host"],
    }
    return torchrec_module("torchrec.distributed.planner.types").Topology(
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        compute_device=topology.compute_device,
        **{name: value for name, value in given.items() if value is not None},
    )


def _option(options: sw.Options, index: int) -> Any:
    """One of our options as TorchRec's, with all its shards.

    Raises:
        UnsupportedError: TorchRec knows no such sharding type or kernel.
    """
    types = torchrec_module("torchrec.distributed.planner.types")
    table = options.tables[int(options.table[index])]
    module, tensor = _module_of(table)
    distinct = int(options.table[index])
    bags, ids = float(options.bags_per_batch[distinct]), float(options.ids_per_batch[distinct])
    num_features = max(table.num_features, 1)
    batch_size = round((bags if table.pooling.value != "NONE" else ids) / num_features)
    kind, kernel = options.type_of(index).name, options.kernel_of(index).name
    return types.ShardingOption(
        name=table.name,
        tensor=tensor,
        module=(table.module, module),
        input_lengths=[ids / num_features / max(batch_size, 1)] * num_features,
        batch_size=batch_size,
        sharding_type=kind,
        partition_by=_partition_by(kind, kernel),
        compute_kernel=kernel,
        shards=[types.Shard(size=list(size), offset=[0, 0]) for size in _sizes(options, index)],
    )


def _sizes(options: sw.Options, index: int) -> list[tuple[int, int]]:
    rows, columns = options.spread(options.num_rows, index), options.spread(options.num_columns, index)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _partition_by(kind: str, kernel: str) -> str:
    """TorchRec's name of the way that shards of a type are placed; raises if TorchRec does not know the type."""
    enumerators = torchrec_module("torchrec.distributed.planner.enumerators")
    known = {
        member.value
        for member in torchrec_module("torchrec.distributed.embedding_types").EmbeddingComputeKernel
    }
    try:
        found = enumerators.get_partition_by_type(kind)
    except ValueError:
        found = None
    if found is None or kernel not in known:
        what = f"the sharding type {kind!r}" if found is None else f"the compute kernel {kernel!r}"
        raise sw.UnsupportedError(
            f"TorchRec knows nothing of {what}: ask another estimator, or for something else"
        )
    return str(found)


def _module_of(table: sw.TableSpec) -> tuple[Any, Any]:
    """TorchRec's collection of one table, on no device, and the table's weights."""
    import torch

    torchrec = torchrec_module("torchrec")
    given: dict[str, Any] = {
        "name": table.name,
        "embedding_dim": table.embedding_dim,
        "num_embeddings": table.num_embeddings,
        "feature_names": list(table.feature_names) or [table.name],
        "data_type": torchrec.DataType[table.data_type.name],
    }
    meta = torch.device("meta")
    if table.pooling.value == "NONE":
        module = torchrec.EmbeddingCollection(device=meta, tables=[torchrec.EmbeddingConfig(**given)])
        tensor = module.embeddings[table.name].weight
    else:
        pooling = torchrec.PoolingType[table.pooling.name]
        config = torchrec.EmbeddingBagConfig(**given, pooling=pooling)
        module = torchrec.EmbeddingBagCollection(device=meta, tables=[config], is_weighted=table.is_weighted)
        tensor = module.embedding_bags[table.name].weight
    _give_optimizer(tensor, table)
    return module, tensor


def _give_optimizer(tensor: Any, table: sw.TableSpec) -> None:
    """The optimizer in the form in which TorchRec's storage estimator looks for it."""
    if table.optimizer is None:
        return
    import torch

    own = torchrec_module("torchrec.optim")
    classes = {
        "sgd": own.SGD,
        "adam": own.Adam,
        "row_wise_adagrad": own.RowWiseAdagrad,
        "adagrad": torch.optim.Adagrad,
    }
    if table.optimizer.name in classes:
        tensor._optimizer_classes = [classes[table.optimizer.name]]
