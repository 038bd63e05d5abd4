"""Limits of a search's work: every constant of it, with its unit and its source.

Work is counted, not timed, so that the same input gives the same plan on any machine. Its unit is the microsecond that
the step takes on the machine it was measured on (AMD EPYC 7B13, one core, NumPy 2.4), which the stages reckon from the
sizes of their arrays.
"""

from __future__ import annotations

from attrs import frozen

STAGES = ("columns", "descent", "neighbourhoods", "program")
"""Parts of the search that can be left out, to measure what each is worth."""


@frozen
class Effort:
    """Amount of work that the search may do.

    The sources: *ablation* is ``tests/benchmarks/planning/plan_ablation.py``, with the results in
    ``tests/benchmarks/LOG.md``; *tolerance* is what the arithmetic or the solver is exact to; *taste* was not measured,
    and matters little.

    Args:
        without: stages that are left out, names in :data:`STAGES`.
        close: a plan this near its bound is as good as the best, a part of it (taste: cost models are not as good).
        fine: the like of ``close`` for few tables, whose programs the solver can close (ablation).
        few_tables: number of tables up to which the search goes on until the gap is ``fine`` (ablation).
        ladder: times tried for a first plan, in parts above the bound (taste: from fine to hopeless).
        margins: memory left free when options are chosen, parts of it (taste: shards fill no rank to the brim).
        parts: largest shards of a first plan, in parts of a rank's memory (taste: from whole tables to crumbs).
        steps_down: parts of the way from the bound to the best plan that are tried (taste).
        narrow: distance of times tried by patterns, a part of the time (ablation).
        few_moves: moves and swaps of a repair, a number (ablation).
        rounds: tables taken out and put back in a turn, a number of times (ablation).
        vain_turns: turns without a gain before that ends, a number (ablation).
        many_tables: number of tables from which on none are taken out and put back (ablation).
        sharpness: exponents of the descent's measure, without unit (ablation).
        descent_rounds: rounds at each of them, a number (ablation).
        column_ranks: ranks from which on patterns are generated, a number (ablation).
        column_alike: tables that each distinct one stands for, from which on they are, a number (ablation).
        column_kinds: kinds of shards in a program of patterns at most, a number (ablation).
        column_rounds: rounds of new patterns, a number (ablation).
        column_times: times tried by patterns, a number (ablation).
        column_enough: parts of the ranks that patterns are to need; the others take what is rounded down (ablation).
        program_columns: columns of a mixed-integer program at most, a number (ablation).
        program_nodes: largest number of nodes of the solver's tree (ablation).
        precision: gap at which the solver may end, a part of its solution (tolerance).
    """

    without: frozenset[str] = frozenset()
    close: float = 3e-3
    fine: float = 5e-4
    few_tables: int = 64
    ladder: tuple[float, ...] = (0.005, 0.03, 0.2, 0.5, 1.0, 3.0, 10.0, 100.0, 1e4)
    margins: tuple[float, ...] = (0.01, 0.03, 0.08, 0.2)
    parts: tuple[float, ...] = (1.0, 0.3, 0.1, 0.03, 0.003, 0.0)
    steps_down: tuple[float, ...] = (0.15, 0.4, 0.7)
    narrow: float = 0.01
    few_moves: int = 60
    rounds: int = 40
    vain_turns: int = 6
    many_tables: int = 400
    sharpness: tuple[float, ...] = (24.0, 72.0, 200.0)
    descent_rounds: int = 24
    column_ranks: int = 32
    column_alike: int = 4
    column_kinds: int = 120
    column_rounds: int = 300
    column_times: int = 12
    column_enough: tuple[float, ...] = (0.985, 0.998, 0.995)
    program_columns: int = 1000
    program_nodes: int = 2_000
    precision: float = 1e-4

    def has(self, stage: str) -> bool:
        """True if a stage takes part."""
        return stage not in self.without
