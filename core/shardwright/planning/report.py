"""The report of a plan: what was tried, what each rank and table takes, and what was assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from attrs import frozen

from shardwright.planning.placement import propose
from shardwright.planning.plan import aligned, ranks_text
from shardwright.planning.search import OBJECTIVE, SearchResult
from shardwright.planning.space import SearchSpace, traffic_bytes
from shardwright.planning.text import bytes_text

_MB = 1e6


@frozen(eq=False)
class Report:
    """What a plan takes, as text.

    Args:
        space: options and costs.
        result: the plan that was found.
        inputs: what went into it, with provenance.
        seconds: how long planning took.
    """

    space: SearchSpace
    result: SearchResult
    inputs: Mapping[str, Any]
    seconds: float

    def __str__(self) -> str:
        result = self.result
        lines = [
            "--- Sharding plan ---",
            f"{result.num_proposals} proposals tried, {result.num_placed} fitted, "
            f"best by {result.proposer!r}, {self.seconds:.3f} s",
            f"{OBJECTIVE}: {result.feedback.value_ms:.4g} ms",
            "",
            *self._ranks(),
            "",
            *self._tables(),
            "",
            *self._kernels(),
            "",
            *self._assumptions(),
        ]
        return "\n".join(lines)

    def _ranks(self) -> Iterator[str]:
        space, feedback = self.space, self.result.feedback
        assert self.result.proposal is not None
        assert feedback.ranks is not None
        assert feedback.used_bytes is not None
        assert feedback.load_ms is not None
        shards = propose(space, self.result.proposal)
        world_size = shards.world_size
        received, sent = (
            np.bincount(feedback.ranks, weights=column[shards.shard] / _MB, minlength=world_size)
            for column in traffic_bytes(space.options, space.topology)
        )
        counts: list[Counter[str]] = [Counter() for _ in range(world_size)]
        for rank, shard in zip(feedback.ranks.tolist(), shards.shard.tolist(), strict=True):
            counts[rank][space.options.type_of(space.options.option[shard]).abbreviation] += 1
        capacity = space.topology.capacity_bytes
        rows = [
            (
                rank,
                *(
                    _share(feedback.used_bytes[rank, tier], capacity[rank, tier])
                    for tier in range(len(space.tiers))
                ),
                f"{feedback.load_ms[rank]:.4g}",
                f"{received[rank]:.2f}",
                f"{sent[rank]:.2f}",
                ", ".join(f"{name}: {count}" for name, count in sorted(counts[rank].items())) or "none",
            )
            for rank in range(world_size)
        ]
        header = ("rank", *space.tiers, "time (ms)", "input (MB)", "output (MB)", "shards")
        yield aligned(header, rows)
        reserved = self.inputs["storage_reservation"]["value"]
        yield (
            f"  memory: weights, optimizer state, input and output; {reserved:.0%} of {space.tiers[0]} is kept free\n"
            "  input, output: per step, MB = 10^6 bytes; time: of all shards together"
        )

    def _tables(self) -> Iterator[str]:
        space, options = self.space, self.space.options
        assert self.result.proposal is not None
        assert self.result.feedback.ranks is not None
        ranks, start, rows = self.result.feedback.ranks.tolist(), 0, []
        for table, option in zip(options.tables, self.result.proposal.tolist(), strict=True):
            stop = start + len(options.layouts[option].blocks)
            kind = options.type_of(option)
            variant = options.layouts[option].variant
            rows.append(
                (
                    table.path,
                    f"{kind.abbreviation} ({kind.name}{f', {variant}' if variant else ''})",
                    options.kernel_of(option).name,
                    f"{space.total_cost_ms[option]:.4g}",
                    ranks_text(ranks[start:stop]),
                )
            )
            start = stop
        yield aligned(("table", "sharding", "compute kernel", "time (ms)", "ranks"), rows)

    def _kernels(self) -> Iterator[str]:
        options = self.space.options
        assert self.result.proposal is not None
        taken = [options.kernel_of(option).name for option in self.result.proposal.tolist()]
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(Counter(taken).items()))
        yield f"compute kernels: {counts}"
        tables: dict[tuple[str, str, str], list[str]] = {}
        for refusal in options.refusals:
            tables.setdefault((refusal.kind, refusal.name, refusal.reason), []).append(refusal.table)
        taken_by = {table.path: name for table, name in zip(options.tables, taken, strict=True)}
        for (kind, name, reason), paths in tables.items():
            took = (
                _taken_instead(name, {taken_by[path] for path in paths}) if kind == "compute kernel" else ""
            )
            whom = repr(paths[0]) if len(paths) == 1 else f"{len(paths)} tables ({paths[0]!r}, ...)"
            yield f"  {kind} {name!r} refused for {whom}: {reason}{took}"

    def _assumptions(self) -> Iterator[str]:
        yield "assumed, because not given:"
        for name, data in self.inputs.items():
            if data["provenance"] == "assumed":
                yield f"  {name} = {_value_text(name, data['value'])} ({data.get('source', '')})"


def _taken_instead(refused: str, taken: set[str]) -> str:
    """What was taken; a kernel that was refused for some layouts may have been taken with another."""
    others = ", ".join(repr(name) for name in sorted(taken - {refused}))
    return f"; {others} taken" if others else f"; {refused!r} taken with another layout"


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_cap"):
        return bytes_text(value)
    if name.endswith("_bw"):
        return f"{bytes_text(1000 * value)}/s"
    return str(value)


def _share(used: float, capacity: float) -> str:
    percent = 100 * used / capacity if capacity else 0.0
    return f"{bytes_text(used)} ({percent:.0f}%)"
