"""Cost of a plan whose tables are not all of one kind: all elements of its outputs are moved once more.

Results of whole tables of one kernel are sent as the kernel makes them, and arrive as the outputs. Beside tables of
another kind they are copied before they are sent, and put in order when all are there. It makes little difference how
many tables are of another kind: no sum over tables says that. A search is told a part of it for each such table.

Legend: A tables, O options, S runs of shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Ints
from shardwright.planning.options.options import Options

WHOLE, CUT, COPY = range(3)


@frozen(eq=False, slots=False)
class Mixing:
    """Cost of tables of several kinds.

    Args:
        options: the options of all tables.
        constants: milliseconds an element: ``mixed_sent``, ``mixed_result``, ``mixed_gradient``.
    """

    options: Options
    constants: Mapping[str, float]

    @cached_property
    def kind(self) -> Ints:
        """Whole, cut or copied: ``[O]``."""
        options = self.options
        copied = np.logical_and.reduceat(options.is_copy, options.first_shard[:-1])
        kind: Ints = np.where(copied, COPY, np.where(options.cuts_rows, CUT, WHOLE))
        return kind

    @cached_property
    def elements(self) -> float:
        """Elements of the outputs of a rank."""
        widths = np.array([table.embedding_dim for table in self.options.tables], dtype=np.float64)
        return float((self.options.multiplicity * self.options.bags_per_batch * widths).sum())

    def of_plan(self, chosen: Ints) -> float:
        """Cost of a plan on each rank, ms.

        Args:
            chosen: the option of each table: ``[A]``.
        """
        kind, kernel = self.kind[chosen], self.options.compute_kernel[chosen]
        routed = kind != COPY
        groups = set(zip(kind[routed].tolist(), kernel[routed].tolist(), strict=True))
        ms, is_regrouped, is_arranged = self.constants, len(groups) > 1, len(set(kind.tolist())) > 1
        an_element = (
            ms["mixed_sent"] * is_regrouped
            + ms["mixed_result"] * is_arranged
            + ms["mixed_gradient"] * (is_regrouped or is_arranged)
        )
        return float(an_element * self.elements)
