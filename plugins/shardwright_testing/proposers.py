"""Conformance tests of proposers.

Legend: A tables, O options, S runs of equal shards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.contracts import Partitioner, Proposer
from shardwright.host.plugin_host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.loaded import Feedback, LoadedPlan
from shardwright.planning.search.placement import Misfit, Placed, Proven, propose
from shardwright.planning.search.search import begun, search
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.watch import Watch
from shardwright_testing.equality.random_cases import LAWS, run_drawn

MAX_PROPOSALS = 5_000
"""A proposer that has not ended for two small tables by then does not end."""

DEADLINE_S = 60.0
"""Longest run of a search after its time is up: far more than the step it is in takes."""

_SPACES = settings(LAWS, max_examples=8)


class ProposerTests:
    """The tests of a proposer: give the fixture ``proposer``, an instance.

    Options are those of all sharding types and kernels that are installed; their costs are made up.
    """

    def test_proposals_keep_the_contract(self, proposer: Proposer) -> None:
        """One option of each table, or those with ranks where they fit; checked as the planner checks."""

        @_SPACES
        @given(_table_lists(), st.integers(1, 4), st.integers(18, 26))
        def check(tables: list[TableSpec], ranks: int, log_bytes: int) -> None:
            space = _space(tables, ranks=ranks, capacity_bytes=1 << log_bytes)
            result = search(space, [proposer], _partitioner(), host().extensions)
            assert result.num_proposals > 0 or log_bytes < 26, (
                f"{proposer.name}: proposes nothing for {len(tables)} tables that fit"
            )

        check()

    def test_proposals_end(self, proposer: Proposer) -> None:
        """Proposals end whatever becomes of them."""

        @_SPACES
        @given(_table_lists(most=2), st.sampled_from([1, 2]))
        def check(tables: list[TableSpec], ranks: int) -> None:
            for capacity in (1 << 40, 1):  # everything fits, nothing fits
                count = len(
                    list(
                        islice(
                            _proposals(proposer, _space(tables, ranks=ranks, capacity_bytes=capacity)),
                            MAX_PROPOSALS + 1,
                        )
                    )
                )
                assert count <= MAX_PROPOSALS, (
                    f"{proposer.name}: does not end: more than {MAX_PROPOSALS} proposals for {len(tables)} tables"
                )

        check()

    def test_proposals_are_the_same_each_time(self, proposer: Proposer) -> None:
        """Plans must not depend on chance, on hash order, or on what the proposer was asked before."""

        @_SPACES
        @given(_table_lists(), st.integers(1, 4), st.integers(18, 26))
        def check(tables: list[TableSpec], ranks: int, log_bytes: int) -> None:
            runs = [
                list(
                    islice(
                        _proposals(proposer, _space(tables, ranks=ranks, capacity_bytes=1 << log_bytes)), 200
                    )
                )
                for _ in range(3)
            ]
            for again in runs[1:]:
                _check_same(proposer, runs[0], again)

        run_drawn(check)

    def test_generators_hold_no_common_state(self, proposer: Proposer) -> None:
        """Two searches that take turns propose what each would alone."""
        spaces = [_space(_tables(count), ranks=2, capacity_bytes=1 << 30) for count in (2, 3)]
        alone = [list(islice(_proposals(proposer, space), 50)) for space in spaces]
        turns = [_proposals(proposer, space) for space in spaces]
        together: list[list[Any]] = [[], []]
        for _ in range(50):
            for index, generator in enumerate(turns):
                together[index] += list(islice(generator, 1))
        for one, other in zip(alone, together, strict=True):
            _check_same(proposer, one, other)

    def test_search_ends_when_its_time_is_up(self, proposer: Proposer) -> None:
        """A generator that works long between proposals looks at ``watch.is_over``."""
        space = _space(_tables(60), ranks=8, capacity_bytes=1 << 24)
        done: list[Any] = []

        def run() -> None:
            done.append(search(space, [proposer], _partitioner(), host().extensions, watch=Watch(seconds=0)))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), (
            f"{proposer.name}: still searching {DEADLINE_S:.0f} s after its time was up; look at watch.is_over"
        )
        assert done, f"{proposer.name}: raised when its time was up"


def _table_lists(*, most: int = 3) -> st.SearchStrategy[list[TableSpec]]:
    shapes = st.tuples(st.integers(1, 20_000), st.sampled_from([16, 64, 128]))
    return st.lists(shapes, min_size=1, max_size=most).map(
        lambda drawn: [TableSpec(f"t{i}", rows, dim, [f"f{i}"]) for i, (rows, dim) in enumerate(drawn)]
    )


def _tables(count: int) -> list[TableSpec]:
    return [TableSpec(f"t{i}", 1000 * (i + 1), (16, 64, 128)[i % 3], [f"f{i}"]) for i in range(count)]


def _space(tables: Sequence[TableSpec], *, ranks: int, capacity_bytes: int) -> SearchSpace:
    """A search space with costs that need no estimator: what a shard holds, and a little for each shard."""
    topology = Topology(ranks, "cpu", ddr_cap=capacity_bytes)
    options = enumerate_options(tables, topology, Constraints(), host(), batch_size=16)
    cells = options.num_rows * options.num_columns
    return SearchSpace(
        options,
        topology,
        {
            "lookup": np.asarray(1e-6 * cells + 0.01, dtype=np.float64),
            "exchange": np.asarray(1e-4 * options.num_columns, dtype=np.float64),
        },
        (4 * cells)[:, None].repeat(len(topology.tiers), axis=1),
        topology.capacity_bytes,
    )


def _partitioner() -> Partitioner:
    """The partitioner that is taken when none is asked for."""
    names = sorted(host().partitioners, key=lambda name: -host().partitioners[name].preference)
    return host().partitioners.create(names[0])


def _proposals(proposer: Proposer, space: SearchSpace) -> Iterator[tuple[list[int], list[int] | None]]:
    """Yield the proposals, each answered with its outcome, as the planner does."""
    generator, partitioner = begun(proposer, space, Watch()), _partitioner()
    try:
        proposed = next(generator)
        while True:
            if isinstance(proposed, Proven):
                proposed = generator.send(Feedback())
                continue
            if isinstance(proposed, Placed):
                yield proposed.proposal.tolist(), proposed.ranks.tolist()
            else:
                yield np.asarray(proposed).tolist(), None
            proposed = generator.send(_feedback(space, proposed, partitioner))
    except StopIteration:
        return


def _feedback(space: SearchSpace, proposed: Any, partitioner: Partitioner) -> Feedback:
    proposal = proposed.proposal if isinstance(proposed, Placed) else np.asarray(proposed)
    shards = propose(space, proposal)
    placed = proposed.ranks if isinstance(proposed, Placed) else partitioner.place(shards)
    over = (shards.fixed_bytes > shards.capacity_bytes).any()
    if isinstance(placed, Misfit):
        return Feedback(misfit=placed)
    if over:
        whole = propose(space, proposal, with_fixed=True)
        return Feedback(misfit=whole.fixed_misfit())
    return Feedback(LoadedPlan(space, proposal, placed, shards))


def _check_same(proposer: Proposer, first: Sequence[Any], again: Sequence[Any]) -> None:
    for number, (one, other) in enumerate(zip(first, again, strict=False)):
        assert one == other, (
            f"{proposer.name}: is not deterministic: proposal {number} is {one[0]}, and {other[0]} when it is asked "
            "again of the same space"
        )
    assert len(first) == len(again), (
        f"{proposer.name}: is not deterministic: {len(first)} proposals, and {len(again)} when it is asked again"
    )
