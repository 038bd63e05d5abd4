"""Bytes of a table's values that move with its rows when it is resharded: weights, and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.row_format import FLOATS
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.estimators.shard_bytes import state_bytes_of_row


def weight_bits(table: TableSpec, kernel: ComputeKernel | None = None) -> int:
    """Bits of an element of a table's rows; those of float32 if nobody here knows the format.

    Args:
        table: the table.
        kernel: its kernel, if it is installed.
    """
    rows = FLOATS.get(table.data_type) if kernel is None else kernel.row_format(table.data_type)
    return 32 if rows is None else rows.bits


@frozen
class ValueBytes:
    """Bytes of a table's values.

    Args:
        weight_bits: bits of an element's weight.
        state_bytes: bytes of an element's optimizer states.
        row_state_bytes: bytes of optimizer states of which a row has one, whatever its columns.
    """

    weight_bits: int = 32
    state_bytes: int = 0
    row_state_bytes: int = 0

    @classmethod
    def of(
        cls, table: TableSpec, kernel: ComputeKernel, device: str, extras: Mapping[str, Any]
    ) -> ValueBytes:
        """Bytes of what a kernel keeps of a table, as it declares its memory.

        Args:
            table: the table.
            kernel: its kernel.
            device: type of the device of its shards.
            extras: JSON data of plugins in its entry of the plan.
        """
        dim = table.embedding_dim
        one = KernelRequest.of(table, dim, device=device, extras=extras)
        # What is declared is a + b D for D columns: a is the row's, b the element's.
        two = evolve(one, num_columns=2 * dim, embedding_dim=2 * dim)
        of_row, of_two = (round(state_bytes_of_row(kernel, request)) for request in (one, two))
        of_element = round((of_two - of_row) / dim)
        return cls(weight_bits(table, kernel), of_element, max(0, of_row - of_element * dim))

    def weights(self, num_elements: int) -> int:
        """Bytes of the weights of so many elements."""
        return -(-num_elements * self.weight_bits // 8)

    def all(self, num_elements: int, num_rows: int) -> int:
        """Bytes of weights and states.

        Args:
            num_elements: elements.
            num_rows: rows whose own states are counted.
        """
        return self.weights(num_elements) + num_elements * self.state_bytes + num_rows * self.row_state_bytes
