"""`Topology` with TorchRec's arguments, `devices` and bandwidths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import shardwright as sw
from shardwright_torchrec.planner import constants
from shardwright_torchrec.planner.types import DeviceHardware, Storage

# TorchRec's defaults of the arguments below, which have no counterpart.
_IDLE = {
    "bwd_compute_multiplier": (2, 2.0),
    "custom_topology_data": (None,),
    "weighted_feature_bwd_compute_multiplier": (1, 1.0),
    "uneven_sharding_perf_multiplier": (1, 1.0),
    "generalized_comms_bandwidths": (None,),
}


class Topology(sw.Topology):
    """The ranks that a model is sharded over.

    On the CPU there is no device memory, and what is said of it is not used, as in TorchRec.

    Args:
        world_size: number of ranks.
        compute_device: `"cpu"` or `"cuda"`.
        hbm_cap: device memory of a rank, bytes.
        ddr_cap: host memory of a rank, bytes.
        ssd_cap: disk of a rank, bytes.
        local_world_size: ranks of a host; all by default.
        pod_size: ranks of a pod; not supported beside `local_world_size`.
        hbm_mem_bw: bandwidth of device memory, bytes/ms.
        ddr_mem_bw: bandwidth of host memory, bytes/ms.
        ssd_mem_bw: bandwidth of the disk, bytes/ms; used with `ssd_cap`.
        hbm_to_ddr_mem_bw: bandwidth at which devices read the host's memory, bytes/ms.
        intra_host_bw: bandwidth between ranks of one host, bytes/ms.
        inter_host_bw: bandwidth between hosts, bytes/ms.
        bwd_compute_multiplier: must be TorchRec's default; the estimator has it.
        custom_topology_data: not supported; `hbm_cap` and `ddr_cap` take a number for each rank.
        weighted_feature_bwd_compute_multiplier: must be TorchRec's default.
        uneven_sharding_perf_multiplier: must be TorchRec's default.
        generalized_comms_bandwidths: not supported; `link_bandwidths` of `shardwright.Topology` takes further links.
        created_by_factory: not used.
        further: further arguments of `shardwright.Topology`.

    Raises:
        UnsupportedError: something is not supported; the text names it.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | Sequence[int] | None = None,
        ddr_cap: int | Sequence[int] | None = None,
        ssd_cap: int | Sequence[int] | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float | None = None,
        ddr_mem_bw: float | None = None,
        ssd_mem_bw: float | None = None,
        hbm_to_ddr_mem_bw: float | None = None,
        intra_host_bw: float | None = None,
        inter_host_bw: float | None = None,
        bwd_compute_multiplier: float = 2,
        custom_topology_data: Any = None,
        weighted_feature_bwd_compute_multiplier: float = 1,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: Any = None,
        created_by_factory: bool = False,
        **further: Any,
    ) -> None:
        _refuse(
            bwd_compute_multiplier=bwd_compute_multiplier,
            custom_topology_data=custom_topology_data,
            weighted_feature_bwd_compute_multiplier=weighted_feature_bwd_compute_multiplier,
            uneven_sharding_perf_multiplier=uneven_sharding_perf_multiplier,
            generalized_comms_bandwidths=generalized_comms_bandwidths,
        )
        if pod_size not in (None, local_world_size, world_size):
            raise sw.UnsupportedError(
                f"pod_size is {pod_size}: ranks are on hosts of local_world_size, and there is no third kind of link"
            )
        if compute_device != "cpu":
            further |= {
                "hbm_cap": hbm_cap,
                "hbm_mem_bw": hbm_mem_bw,
                "hbm_to_ddr_mem_bw": hbm_to_ddr_mem_bw,
            }
        if ssd_cap is not None:
            further = {"memory_bytes": {"ssd": ssd_cap}, **further}
            if ssd_mem_bw is not None:
                further = {"memory_bandwidths": {"ssd": ssd_mem_bw}, **further}
        super().__init__(
            world_size,
            compute_device,
            ddr_cap=ddr_cap,
            local_world_size=local_world_size,
            ddr_mem_bw=ddr_mem_bw,
            intra_host_bw=intra_host_bw,
            inter_host_bw=inter_host_bw,
            **further,
        )

    bwd_compute_multiplier = 2
    weighted_feature_bwd_compute_multiplier = 1
    uneven_sharding_perf_multiplier = 1.0

    @property
    def hbm_mem_bw(self) -> float:
        """Bandwidth of device memory, bytes/ms; TorchRec's default on the CPU, which has none."""
        return self.memory_bandwidths.get("hbm", constants.HBM_MEM_BW)

    @property
    def ddr_mem_bw(self) -> float:
        """Bandwidth of host memory, bytes/ms."""
        return self.memory_bandwidths["ddr"]

    @property
    def hbm_to_ddr_mem_bw(self) -> float:
        """Bandwidth at which devices read the host's memory, bytes/ms; TorchRec's default on the CPU."""
        return self.link_bandwidths.get("hbm_to_ddr", constants.HBM_TO_DDR_MEM_BW)

    @property
    def intra_host_bw(self) -> float:
        """Bandwidth between ranks of one host, bytes/ms."""
        return self.link_bandwidths["intra_host"]

    @property
    def inter_host_bw(self) -> float:
        """Bandwidth between hosts, bytes/ms."""
        return self.link_bandwidths["inter_host"]

    @cached_property
    def devices(self) -> list[DeviceHardware]:
        """The memory of each rank, and no time taken yet."""
        return devices_of(self)


def devices_of(topology: sw.Topology) -> list[DeviceHardware]:
    """The memory of each rank of a topology."""
    tiers = list(topology.tiers)
    known = ("hbm", "ddr", "ssd")
    return [
        DeviceHardware(
            rank, Storage(*(int(row[tiers.index(tier)]) if tier in tiers else 0 for tier in known))
        )
        for rank, row in enumerate(topology.capacity_bytes)
    ]


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value not in _IDLE[name]:
            raise sw.UnsupportedError(
                f"Topology({name}={value!r}) is not supported; an estimator of your own may do what it is for"
            )
