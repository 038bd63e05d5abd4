"""Bytes that ranks send each other when a model goes from one plan to another, and how long that takes by the model.

Tables move one after the other, and all ranks wait for the last: their times add up. A table's time is that of the rank
that takes longest. Its links inside the host and between hosts work at the same time, each in both directions at once:
the longer counts. To that comes the time to read and write in memory what the rank sends, receives, and moves from its
old blocks to its new ones. Latencies are left out: a piece is large beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from attrs import field, frozen

from shardwright.planning.layouts.layout import Layout
from shardwright.planning.machines.topology import Topology
from shardwright_plugins.plan_differences.layout_moves import LayoutMove
from shardwright_plugins.plan_differences.value_bytes import ValueBytes

SAME_RANK, INTRA_HOST, INTER_HOST = "same_rank", "intra_host", "inter_host"
LINKS = (SAME_RANK, INTRA_HOST, INTER_HOST)
"""Kinds of link between two ranks."""

ByLink: TypeAlias = Mapping[tuple[int, str], int]
"""Bytes by rank and class of way."""


def link_of(source: int, target: int, topology: Topology) -> str:
    """The class of the way between two ranks."""
    if source == target:
        return SAME_RANK
    return INTRA_HOST if topology.host_of(source) == topology.host_of(target) else INTER_HOST


@frozen
class TableMoves:
    """Bytes of one table that go from rank to rank.

    Args:
        received_weights: bytes of weights that come to ranks from others.
        sent: bytes of weights and optimizer states that leave each rank, or stay there.
        received: bytes that come to each rank, or stay there.
    """

    received_weights: int = 0
    sent: ByLink = field(factory=dict)
    received: ByLink = field(factory=dict)

    def ms(self, topology: Topology) -> float:
        """Time that it takes by the model, ms."""
        ranks = {rank for rank, _ in (*self.sent, *self.received)}
        return max((self._rank_ms(rank, topology) for rank in ranks), default=0.0)

    def _rank_ms(self, rank: int, topology: Topology) -> float:
        both, speed = (INTRA_HOST, INTER_HOST), topology.link_bandwidths
        sent, received = (
            {link: of.get((rank, link), 0) for link in LINKS} for of in (self.sent, self.received)
        )
        travel = max(max(sent[link], received[link]) / speed[link] for link in both)
        # All is read and written once: from block to block, from a block to a piece, from a piece to a block.
        touched = sent[SAME_RANK] + sum(sent[link] + received[link] for link in both)
        return travel + 2 * touched / topology.read_bandwidth("device", topology.compute_devices[rank])


def moves_of(old: Layout, new: Layout, values: ValueBytes, topology: Topology) -> TableMoves:
    """The moves that a resharding makes, of blocks of the one layout to those of the other."""
    move = LayoutMove(old, new, has_row_values=values.row_state_bytes > 0)
    weights, sent, received = 0, Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for flow in move.flows():
        source, target = flow.source.rank, flow.target.rank
        assert source is not None  # a plan's blocks have ranks
        assert target is not None
        num_elements, num_rows = move.num_cells(flow)
        link, size = link_of(source, target, topology), values.all(num_elements, num_rows)
        sent[source, link] += size
        received[target, link] += size
        weights += values.weights(num_elements) * (source != target)
    return TableMoves(weights, sent, received)


@frozen(eq=False)
class ReshardMoves:
    """Bytes that a resharding moves.

    Args:
        tables: the moves of each table that changes.
        topology: the ranks.
        counts_states: optimizer states of all these tables are counted; else, for lack of what they are, of some or
            all of them only weights are.
    """

    tables: tuple[TableMoves, ...]
    topology: Topology
    counts_states: bool = True

    @property
    def by_link(self) -> dict[str, int]:
        """Bytes by class of way."""
        found = dict.fromkeys(LINKS, 0)
        for (_, link), size in _sum(table.sent for table in self.tables).items():
            found[link] += size
        return found

    @property
    def by_rank(self) -> dict[int, tuple[int, int]]:
        """Bytes that each rank sends to others and receives from them, of those that do."""
        sent, received = (
            _to_others(_sum(getattr(table, side) for table in self.tables)) for side in ("sent", "received")
        )
        return {rank: (sent[rank], received[rank]) for rank in sorted({*sent, *received})}

    @property
    def sent_bytes(self) -> int:
        """Bytes that go to other ranks."""
        return sum(sent for sent, _ in self.by_rank.values())

    @property
    def ms(self) -> float:
        """Time that it takes by the model, ms."""
        return sum(table.ms(self.topology) for table in self.tables)

    def to_data(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "bytes": self.by_link,
            "ranks": {
                str(rank): {"sent_bytes": sent, "received_bytes": received}
                for rank, (sent, received) in self.by_rank.items()
            },
            "ms": self.ms,
            "counts_optimizer_states": self.counts_states,
            "topology": self.topology.to_data(),
        }


def _sum(each: Iterable[ByLink]) -> Counter[tuple[int, str]]:
    total = Counter[tuple[int, str]]()
    for sizes in each:
        total.update(sizes)
    return total


def _to_others(sizes: ByLink) -> Counter[int]:
    total = Counter[int]()
    for (rank, link), size in sizes.items():
        if link != SAME_RANK and size:
            total[rank] += size
    return total
