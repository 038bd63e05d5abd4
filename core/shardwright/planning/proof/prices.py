"""Prices of shards in the proof of a bound: what they are, and what shards that fit into a rank together are worth.

The second is a knapsack problem, stated here anew and given to a solver; nothing of the search is used but that solver.
Legend: S runs of equal shards, N of them, D dimensions (time, then memory tiers).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwright.planning.arrays import Floats
from shardwright.planning.options.options import Options
from shardwright.planning.proof.solver import Entries, MixedProgram
from shardwright.planning.watch import Watch

# The solver's tolerance, and the nodes of its tree.
_EXACT, _NODES = 2e-6, 4000


def prices_of(options: Options, data: Mapping[str, Mapping[str, list[float]]]) -> Floats:
    """Read the price of each shard, given by table and option: ``[S]``.

    Args:
        options: all there are.
        data: ``{path: {position of the option: [price of each run]}}``.

    Raises:
        ValueError: there is no such table, or a price is not finite or negative.
        IndexError: there is no such option.
    """
    prices, paths = np.zeros(options.num_shards), [table.path for table in options.all_tables]
    for path, of_options in data.items():
        mine = options.of_table(int(options.distinct_table[paths.index(path)]))
        for position, of_runs in of_options.items():
            prices[options.shards_of(mine[int(position)])] = of_runs
    if not ((prices >= 0) & (prices < np.inf)).all():
        raise ValueError("a price is negative or not finite")
    return prices


def most_worth(needs: Floats, prices: Floats, room: Floats) -> float:
    """No shards that go into a room together are worth more, by the bound of a solver.

    Args:
        needs: resources that each shard takes: ``[N, D]``.
        prices: price of each shard: ``[N]``.
        room: resources that there are: ``[D]``.
    """
    fits = (prices > 0) & (needs <= room).all(axis=1)
    if not fits.any():
        return 0.0
    kinds = np.unique(np.column_stack([needs[fits], prices[fits]]), axis=0)
    part, worth = kinds[:, :-1] / np.maximum(room, 1e-300), kinds[:, -1] / prices.max()
    most = np.floor(1 / np.maximum(part.max(axis=1), 1e-9) * (1 + _EXACT))
    found = MixedProgram(
        cost=-worth,
        matrix=Entries.of(part.T),
        lower=np.full(len(room), -np.inf),
        upper=np.ones(len(room)),
        most=most,
        is_whole=np.ones(len(worth), dtype=bool),
    ).solve(most_nodes=_NODES, precision=_EXACT, watch=Watch())
    return float(prices.max()) * -found.bound * (1 + _EXACT)
