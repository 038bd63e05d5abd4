"""A step of this engine as amounts: ids routed, vectors exchanged and put in order, copies kept equal.

What a rank does with its own batch, whoever owns the rows (routing ids, putting results in order, collecting gradients)
is counted on the owner for all ranks: their mean is what each rank does.

Legend: S runs of shards, W ranks, N ids, V vectors, D columns, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.arguments import NonNegativeFloat, problem
from shardwright.errors import PlanningError
from shardwright.planning.arrays import ID_BYTES, Bools, Floats
from shardwright.planning.layouts.row_maps import RowMap
from shardwright.planning.options.search_space import gradient_columns, vector_bytes
from shardwright.planning.plugin_calls import calling
from shardwright_plugins.estimators.engine.work import LookupWork, even_rows
from shardwright_plugins.estimators.shard_bytes import ShardAmounts, state_bytes_a_row

_LENGTH_BYTES, _VALUE_BYTES = 4, 4
_NS_A_MS = 1e6
_WEIGHT_EFFORT = 0.25
ROWS_EFFORT = 2.0
"""Time of a byte of touched rows beside one of batches, as the engine counts when it chooses a form."""

OF_ENGINE: Mapping[str, tuple[str, ...]] = {
    "input_communication": ("whole_id", "whole_bag", "whole_shard", "whole_sent"),
    "id_partition": ("cut_id", "cut_bag", "cut_shard", "cut_sent"),
    "forward_compute": ("routed_lookup", "copy_lookup"),
    "forward_communication": ("whole_result", "cut_result", "cut_vector", "copy_result", "copy_route"),
    "backward_communication": (
        *("whole_gradient", "cut_gradient"),
        *("copy_gradient", "gathered_byte", "summed_byte", "copy_shard"),
    ),
    "backward_compute": ("routed_update", "copied_id", "copied_row_line", "copied_shard"),
    "mixing": ("mixed_sent", "mixed_result", "mixed_gradient"),
}
"""Phase -> constants of the engine on a machine, whatever the kernel."""
ENGINE = tuple(name for names in OF_ENGINE.values() for name in names)


def until_all_have_computed(own: Floats, cores_a_rank: float, ranks_a_host: int) -> float:
    """Time until every rank has computed, where ranks of a host share its cores: the slowest host's.

    A host takes as long as all its cores need for the work of all, but no less than the longest rank alone on a core.

    Args:
        own: time of each rank while all others of its host work too: ``[W]``.
        cores_a_rank: cores that a rank has meanwhile, 1 at most.
        ranks_a_host: ranks of a host, which are neighbours.
    """
    of_hosts = own.reshape(-1, ranks_a_host).mean(1)
    return float(max(cores_a_rank * own.max(), of_hosts.max()))


@frozen(eq=False, slots=False)
class StepWork(ShardAmounts):
    """A step of each shard, as columns over runs.

    Args:
        options: options.
        topology: the ranks.
        cache_bytes: bytes of a rank's near cache.
    """

    cache_bytes: float

    @cached_property
    def is_trained(self) -> Bools:
        """True for shards that are updated."""
        return self.is_filled & ~self.options.is_frozen[self.table]

    @cached_property
    def is_cut(self) -> Bools:
        """True for shards whose rows are cut, so that partial sums come home."""
        return self.options.cuts_rows[self.options.option]

    @cached_property
    def beside_id(self) -> Floats:
        """Bytes that travel beside an id, in ids.

        They take as long as ids of whole tables of so many bytes, also where rows are cut, whose ids take most of their
        time to be parted. Measured with weights, which are half an id: 0.36 and 0.45 of the time of an id of whole
        tables, and where rows are cut 0.39 and 0.84 (6 tables, 20 and 40 ids a bag, two ranks of an AMD EPYC).
        """
        beside: Floats = self.options.id_bytes / ID_BYTES - 1
        return beside

    def lookups(self) -> LookupWork:
        """The lookups, as kernels make them."""
        return self._work(self.batches)

    def updates(self) -> LookupWork:
        """The updates: a copy makes those of all batches, as far as gradients are not added up by rows before."""
        return self._work(self.topology.world_size * np.where(self.is_copy, self.sent_share, 1.0))

    def update_amounts(self) -> Mapping[str, Floats]:
        """The amounts of :meth:`updates`; an id with a weight counts as one and a quarter.

        Measured with weights: 1.4 to 3.5 ns more, and 2.1 in the median of six cases with 4 to 30 ids a bag, of 8.3 ns
        that the constant ``update_id`` says (``fused_numba``, one thread of an AMD EPYC).
        """
        is_weighted = np.array([table.is_weighted for table in self.options.tables], dtype=np.float64)
        amounts = self.updates().amounts()
        return {
            **amounts,
            "update_id": amounts["update_id"] * (1.0 + _WEIGHT_EFFORT * is_weighted[self.table]),
        }

    def _work(self, batches: Floats) -> LookupWork:
        options = self.options
        return LookupWork(
            ids=self.own_ids * batches,
            rows=options.num_rows.astype(np.float64),
            even_rows=self.even_rows,
            vectors=self.own_vectors * batches,
            columns=options.num_columns.astype(np.float64),
            gradient_columns=gradient_columns(options).astype(np.float64),
            row_bytes=options.row_bytes * self.is_filled,
            state_bytes=state_bytes_a_row(options) * self.is_filled,
            updates_all=options.by_request(lambda kernel, _: kernel.fuses_optimizer) == 0,
            cache_bytes=self.cache_bytes,
        )

    @cached_property
    def even_rows(self) -> Floats:
        """Rows of each shard on which ids fall: its own, or its part of those that its table's profile makes it."""
        options, rows = self.options, self.options.num_rows.astype(np.float64)
        stats = [table.cache.stats for table in options.tables]
        distinct = np.array([own.expected_lookups if own else 0.0 for own in stats])
        ids = options.ids_per_batch * self.topology.world_size
        # A profile is of a step of all ranks. Its rows go to shards as the ids do, of which hot rows get more.
        is_told = (distinct > 0) & (distinct < ids)
        found = even_rows(np.where(is_told, distinct, 1.0), np.where(is_told, ids, 2.0))
        of_shard = np.minimum(rows, found[self.table] * options.id_fraction)
        return np.where(is_told[self.table], of_shard, rows)

    def amounts(self) -> Mapping[str, Floats]:
        """The amounts that constants of :data:`ENGINE` are multiplied by: ``[S]`` each."""
        routed = np.where(self.is_copy, 0.0, self.topology.world_size)
        whole, cut = routed * ~self.is_cut, routed * self.is_cut
        results, gradients = (self.own_vectors * own / _VALUE_BYTES for own in vector_bytes(self.options))
        trained = self.is_trained
        is_routed = ~self.is_copy & self.is_filled
        elements = self.own_vectors * self.options.num_columns
        return {
            "whole_id": self.own_ids * (whole + self.beside_id * routed),
            "whole_bag": self.own_vectors * whole,
            "whole_shard": 1.0 * (is_routed & ~self.is_cut),
            "whole_sent": elements * whole,
            "cut_id": self.cut_ids,
            "cut_bag": self.own_vectors * cut,
            "cut_shard": 1.0 * (is_routed & self.is_cut),
            "cut_sent": elements * cut,
            "routed_lookup": 1.0 * is_routed,
            "copy_route": 1.0 * (self.is_copy & self.is_filled),
            "copy_lookup": 1.0 * (self.is_copy & self.is_filled),
            "whole_result": results * whole,
            "cut_result": results * cut,
            "cut_vector": self.own_vectors * cut,
            "copy_result": results * self.is_copy,
            "whole_gradient": gradients * whole * trained,
            "cut_gradient": gradients * cut * trained,
            "routed_update": 1.0 * (is_routed & trained),
            **self._copies(gradients),
        }

    def _copies(self, gradients: Floats) -> dict[str, Floats]:
        """Bytes that keep copies equal, of the form that the engine sends, and the work of their updates."""
        others = float(self.topology.world_size - 1)
        updated = self.is_copy & self.is_trained
        sent = np.where(updated, self.least_bytes * others, 0.0)
        is_dense = self.least_bytes == self.form_bytes[2]
        # All batches' ids are joined and sorted when nothing else goes on, or gradients of rows added up and written.
        return {
            "copy_gradient": np.where(updated, gradients, 0.0),
            "gathered_byte": np.where(is_dense, 0.0, sent),
            "summed_byte": np.where(is_dense, sent, 0.0),
            "copied_id": np.where(updated, self.updates().ids, 0.0),
            "copied_row_line": np.where(updated, self.updates().amounts()["update_row_line"], 0.0),
            "copied_shard": 1.0 * updated,
            "copy_shard": 1.0 * updated,
        }

    @cached_property
    def cut_ids(self) -> Floats:
        """Ids that are parted by a row map.

        Where a part of the rows is copied, the copies part all of the table's ids once more to find theirs, and those
        ids are among what the other rows' router parts.
        """
        parted_again = self.options.ids_per_batch[self.table] * (1.0 + self.options.id_fraction)
        ids = np.where(self.is_copy, parted_again, self.own_ids * self.topology.world_size)
        return ids * (self.is_cut & self.is_filled)

    @cached_property
    def map_ms(self) -> Floats:
        """Time of row maps beyond a division of each id, as they declare it, ms.

        Raises:
            PlanningError: one declares no time.
        """
        an_id = np.array([ns_per_id(layout.row_map) for layout in self.options.layouts])
        ms: Floats = self.cut_ids * an_id[self.options.option] / _NS_A_MS
        return ms

    @cached_property
    def least_bytes(self) -> Floats:
        """Bytes that one rank sends another to keep a copy equal."""
        batch, rows, dense = self.form_bytes
        return np.where(ROWS_EFFORT * rows < np.minimum(batch, dense), rows, np.minimum(batch, dense))

    @cached_property
    def sent_share(self) -> Floats:
        """The part of a batch's bytes that is sent: below 1 where gradients of rows are added up before."""
        batch = self.form_bytes[0]
        share: Floats = np.divide(self.least_bytes, batch, where=batch > 0, out=np.zeros_like(batch))
        return share if self.topology.world_size > 1 else np.ones_like(share)

    @cached_property
    def form_bytes(self) -> tuple[Floats, Floats, Floats]:
        """Bytes that one rank sends another in each form: its batch, rows that it touched, the dense gradient."""
        options, table = self.options, self.table
        row_bytes = vector_bytes(options)[1]
        lengths = _LENGTH_BYTES * options.is_pooled[table] * self.own_vectors
        batch = self.own_ids * options.id_bytes + lengths + self.own_vectors * row_bytes
        room: Floats = np.minimum(self.own_ids, options.num_rows)
        rows: Floats = room * (ID_BYTES + _VALUE_BYTES * options.num_columns)
        # As the engine counts: each rank sends 2 (W - 1) / W of the values, which are 2 / W of them to each other rank.
        dense: Floats = (
            2 / self.topology.world_size * options.num_rows * (options.num_columns + 1.0) * _VALUE_BYTES
        )
        return batch, rows, dense


def ns_per_id(row_map: RowMap) -> float:
    """Time that a row map declares for each id, ns.

    Raises:
        PlanningError: it is no finite number of 0 or more, or it cannot be asked.
    """
    who = f"row map {row_map.name!r} of module {type(row_map).__module__!r}"
    with calling(who):
        declared = row_map.ns_per_id
        if wrong := problem("ns_per_id", declared, NonNegativeFloat):
            raise PlanningError(f"{who} broke its contract: {wrong}")
        return float(declared)
