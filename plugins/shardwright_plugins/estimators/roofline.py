"""roofline: bytes moved over the bandwidth of what they move through, and the latency of each collective.

A lookup does next to no arithmetic for the bytes it reads, so that memory and links bound every phase of a step
(Williams, Waterman, Patterson 2009; for embeddings Naumov et al. 2019, arXiv:1906.00091). The model follows the
dataflow, and takes every bandwidth and latency from the topology. ``B`` a rank's bags, ``N`` its ids, ``W`` ranks,
``D`` columns of a shard, ``f`` the part of the table's lookups that are of its rows (0 for an empty one, which costs
nothing):

- input: ``f N W`` ids of 8 bytes (12 with weights; more with columns that the kernel asks for) and ``B W`` lengths of
  4 bytes come in. Where rows are cut, only bags with ids travel, of bags of ``n`` ids ``1 - (1 - f)^n``; so ``B`` is
  less, here and below.
- lookup: the ids, ``f N W`` rows, each a whole number of cache lines, from where the kernel reads them (a cache's
  misses from the host's memory), and ``B W D`` float32 sums written.
- results: ``B W`` vectors go out, float32 or what their codec makes of them. Where sums are made inside the host, these
  go to its ranks, and the sums, ``B`` for each other host, go across.
- gradients: as many come back. Copies receive the ids and gradients of all ranks or the dense gradient, whichever is
  less.
- update: ids are sorted, gradients gathered, each distinct row and its optimizer state read and written. Of ``f N W``
  ids drawn from ``R`` rows ``R (1 - exp(-f N W / R))`` are distinct. Kernels that show gradients write a dense one,
  and read and write everything.

Of what a rank exchanges with all, ``1 / W`` stays on it and the rest parts over the links inside the host and between
hosts, which work at the same time. The collectives of a step are few, and all tables share them: each table has its
part of their latency.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from attrs import frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.estimator import PERFORMANCE, Estimator
from shardwright.planning.arrays import Bools, Floats
from shardwright.planning.machines.topology import CPU_DEVICE, Topology
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import (
    vector_bytes,
)
from shardwright_plugins.estimators.shard_bytes import ShardAmounts, state_bytes_a_row, synchronised_bytes

LENGTH_BYTES = 4
SUM_BYTES = 4
"""Kernels sum in float32."""
LINE_BYTES = 64
"""Bytes that a memory moves at least: a cache line of x86, two sectors of an NVIDIA device."""
SORT_BYTES_AN_ID = 96
"""Four passes of a radix sort over 32 bits, each reading and writing an id of 8 bytes and a position of 4."""
INPUT_COLLECTIVES = 2
"""A header, then one message of lengths, ids and weights."""


class Roofline(Estimator):
    """Model of a step by the bytes it moves through memories and links, and the latency of its collectives."""

    name: ClassVar[str] = "roofline"
    measures: ClassVar[str] = PERFORMANCE
    depends_on_shape_only: ClassVar[bool] = True
    preference: ClassVar[int] = 20

    def serves(self, topology: Topology) -> bool:
        """True for several ranks on CPUs: its plans were faster there than those by ``torchrec`` (page on machines)."""
        return topology.world_size > 1 and set(topology.device_types) == {CPU_DEVICE}

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Milliseconds of each phase, ``[S]``."""
        step = _Step(options, topology)
        return {
            "input_communication": step.input_ms,
            "forward_compute": step.lookup_ms,
            "forward_communication": step.results_ms,
            "backward_communication": np.where(step.is_frozen, 0.0, step.gradients_ms),
            "backward_compute": np.where(step.is_frozen, 0.0, step.update_ms),
        }

    def provenance(self, options: Options) -> Mapping[str, Any]:
        """The constants of the model."""
        return {
            "line_bytes": LINE_BYTES,
            "sort_bytes_an_id": SORT_BYTES_AN_ID,
        }


@frozen(eq=False, slots=False)
class _Step(ShardAmounts):
    """A step of each shard: columns over runs of shards."""

    @cached_property
    def is_frozen(self) -> Bools:
        """True for shards of tables that get no gradient."""
        return self.options.is_frozen[self.table]

    @cached_property
    def ids(self) -> Floats:
        """Ids looked up."""
        return self.own_ids * self.batches

    @cached_property
    def vectors(self) -> Floats:
        """Results: one a bag that travels, or one an id."""
        return self.own_vectors * self.batches

    @cached_property
    def input_bytes(self) -> Floats:
        """Ids with what travels beside each, and lengths."""
        lengths = np.where(self.options.is_pooled[self.table], self.vectors, 0.0)
        return self.ids * self.options.id_bytes + lengths * LENGTH_BYTES

    @cached_property
    def row_bytes(self) -> Floats:
        """Bytes that are moved for one row."""
        # Whole lines are moved, whatever part of them a row fills.
        return np.ceil(self.options.row_bytes / LINE_BYTES) * LINE_BYTES

    @cached_property
    def input_ms(self) -> Floats:
        """Ids on their way in; copies look up their own."""
        travel = self._exchange_ms(self.input_bytes) + INPUT_COLLECTIVES * self._latency_ms()
        return np.where(self.is_copy, 0.0, travel)

    @cached_property
    def lookup_ms(self) -> Floats:
        """Ids and rows read, sums written."""
        sums = self.vectors * self.options.num_columns * SUM_BYTES
        streamed = (self.input_bytes + sums) / self._memory_bandwidth
        return streamed + self.ids * self.row_bytes * self._read_ms_a_byte

    @cached_property
    def results_ms(self) -> Floats:
        """Sums on their way out."""
        return np.where(self.is_copy, 0.0, self._vectors_ms(vector_bytes(self.options)[0]))

    @cached_property
    def gradients_ms(self) -> Floats:
        """Gradients on their way in, as the results went out; or what keeps copies equal."""
        kept_equal = self._exchange_ms(synchronised_bytes(self.options, self.topology)) + self._latency_ms()
        return np.where(self.is_copy, kept_equal, self._vectors_ms(vector_bytes(self.options)[1]))

    @cached_property
    def update_ms(self) -> Floats:
        """Ids sorted, gradients gathered, rows and state read and written."""
        world_size = float(self.topology.world_size)
        ids = np.where(self.is_copy, self.ids * world_size, self.ids)  # copies apply what all ranks looked up
        rows = np.maximum(self.options.num_rows, 1)
        # Distinct rows among n ids that fall evenly on R: R (1 - (1 - 1 / R)^n), about R (1 - e^(-n / R)).
        touched = np.where(self._updates_all, rows, rows * -np.expm1(-ids / rows)) * self.is_filled
        gathered = ids * self.options.num_columns * SUM_BYTES
        # A dense gradient is written and read again. Rows and state are read and written: twice their bytes.
        dense = 2 * np.where(self._updates_all, touched * self.row_bytes, 0.0)
        streamed = ids * SORT_BYTES_AN_ID + gathered + dense + 2 * touched * state_bytes_a_row(self.options)
        return streamed / self._memory_bandwidth + 2 * touched * self.row_bytes * self._read_ms_a_byte

    def _vectors_ms(self, bytes_of_one: Floats) -> Floats:
        """Compute the time of vectors between shards and ranks, straight or, as sums, through the host, ms."""
        pooled = self.options.is_pooled[self.table]
        through_host = self.options.sums_inside_host[self.options.option] & pooled
        total = self.vectors * bytes_of_one
        straight = self._exchange_ms(total) + self._latency_ms()
        return np.where(through_host, self._through_host_ms(total), straight)

    def _exchange_ms(self, total_bytes: Floats) -> Floats:
        """Compute the time of each shard's exchange with all ranks, ms, without what stays on its rank."""
        topology, links = self.topology, self.topology.link_bandwidths
        # Each rank gets 1 / W. Links inside and between hosts work at the same time: the slower side counts.
        a_rank = total_bytes / topology.world_size
        inside = a_rank * (topology.local_world_size - 1) / links["intra_host"]
        across = a_rank * (topology.world_size - topology.local_world_size) / links["inter_host"]
        return np.maximum(inside, across)

    def _through_host_ms(self, total_bytes: Floats) -> Floats:
        """Compute the time to make sums inside the host and to cross to the others, ms."""
        topology, links = self.topology, self.topology.link_bandwidths
        local = topology.local_world_size
        # Sums inside the host: (L - 1) / L of the bytes go to another rank of it.
        inside = total_bytes * (local - 1) / local / links["intra_host"]
        # Then one sum for each of the other hosts crosses, of a batch each.
        a_batch = total_bytes / topology.world_size
        across = a_batch * (topology.num_hosts - 1) / links["inter_host"]
        return inside + across + self._latency_ms("intra_host", local) + self._latency_ms()

    def _latency_ms(self, link: str | None = None, num_ranks: int | None = None) -> Floats:
        """A table's part in the latency of a collective; none without others to talk to."""
        count = self.topology.world_size if num_ranks is None else num_ranks
        slowest = self.topology.link_between(count) if link is None else link
        shared = self.topology.link_latencies_ms[slowest] / len(self.options.all_tables) if count > 1 else 0.0
        return np.where(self.is_filled, shared, 0.0)

    @cached_property
    def _memory_bandwidth(self) -> Floats:
        """Bytes per millisecond at which a kernel streams through the device's memory."""
        return self.options.by_request(
            lambda kernel, request: (
                self.topology.read_bandwidth("device", request.device) * kernel.bandwidth_fraction(request)
            )
        )

    @cached_property
    def _read_ms_a_byte(self) -> Floats:
        """Milliseconds a byte of rows takes, from wherever it comes."""
        return self.options.by_request(self._read_cost)

    def _read_cost(self, kernel: ComputeKernel, request: KernelRequest) -> float:
        parts = kernel.reads(request).items()
        slowness = sum(
            part / self.topology.read_bandwidth(tier, request.device) for tier, part in parts if part
        )
        return slowness / kernel.bandwidth_fraction(request)

    @cached_property
    def _updates_all(self) -> Bools:
        """The kernel shows a dense gradient, which updates every row."""
        return self.options.by_request(lambda kernel, _: kernel.fuses_optimizer) == 0
