"""Rows with a cache: whole tables in one memory, the rows in use in another.

Legend: R rows of all tables, S slots, U rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from shardwright_plugins.compute_kernels.row_cache.sets import NONE, CacheSets

WEIGHT = "weight"
"""Name of the weights among a row's values."""
Values: TypeAlias = dict[str, Tensor]
"""A row's weights and optimizer states by name, ``[rows, columns]`` each."""


class CachedRows:
    """Weights and optimizer state of rows, and a cache of them, in which a row has all of its values.

    Args:
        kept: values of all rows, ``[R, columns]`` each.
        sets: bookkeeping of the cache.
        device: device of the cache.
    """

    def __init__(self, kept: Values, sets: CacheSets, device: torch.device) -> None:
        self._kept, self._sets, self._device = kept, sets, device
        self._held = {
            name: torch.zeros(sets.num_slots, values.shape[1], dtype=values.dtype, device=device)
            for name, values in kept.items()
        }
        self._is_changed = torch.zeros(sets.num_slots, dtype=torch.bool, device=device)
        self.num_hits = self.num_misses = 0
        self.stamp = 0
        """Number of times that rows came into the cache: slots hold the same rows while it is the same."""

    def use(self, rows: Tensor) -> Tensor:
        """Bring rows into the cache, and write back those that leave it.

        Args:
            rows: distinct rows in rising order, ``[U]``.

        Returns:
            Each row's slot, or :data:`~.sets.NONE`.
        """
        slots, changes = self._sets.use(rows)
        self.num_misses += changes.num_missed
        self.num_hits += len(rows) - changes.num_missed
        if changes.num_missed:
            self.stamp += 1
            self._write_back(changes.slots, changes.leave)
            self._fill(changes.slots, changes.come)
        return slots

    def find(self, rows: Tensor) -> Tensor:
        """Each row's slot, or :data:`~.sets.NONE`; nothing changes."""
        return self._sets.find(rows)

    def read(self, names: Iterable[str], rows: Tensor, slots: Tensor) -> Values:
        """Values of some rows, ``[U, columns]`` each: from the cache, or from where they are kept.

        Args:
            names: names of the values.
            rows: the rows, ``[U]``.
            slots: their slots, ``[U]``.
        """
        values = {name: self._held[name].index_select(0, slots.clamp(min=0)) for name in names}
        missing = (slots == NONE).nonzero().squeeze(1)
        if len(missing):
            for name, own in self._fetched(names, rows[missing]).items():
                values[name].index_copy_(0, missing, own)
        return values

    def write(self, rows: Tensor, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        """Change all values of some rows: in the cache, or where they are kept."""
        is_held = slots != NONE
        if bool(is_held.all()):
            self._put(slots, values)
            return
        self._put(slots[is_held], {name: own[is_held] for name, own in values.items()})
        self._keep(rows[~is_held], {name: own[~is_held] for name, own in values.items()})

    def flush(self) -> None:
        """Write changed rows back; they stay in the cache."""
        slots, rows = self._sets.occupied()
        self._write_back(slots, rows)

    def reload(self) -> None:
        """Read the rows of the cache again, after somebody changed them where they are kept."""
        self._fill(*self._sets.occupied())

    def _write_back(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows of some slots back, if they were changed."""
        is_due = self._is_changed[slots]
        slots, rows = slots[is_due], rows[is_due]
        if len(slots):
            self._is_changed[slots] = False
            self._keep(rows, {name: held.index_select(0, slots) for name, held in self._held.items()})

    def _fill(self, slots: Tensor, rows: Tensor) -> None:
        """Read rows into slots."""
        # In rising order, as they lie in the file.
        rows, order = rows.sort()
        for name, own in self._fetched(self._kept, rows).items():
            self._held[name].index_copy_(0, slots[order], own)
        self._is_changed[slots] = False

    def _put(self, slots: Tensor, values: Mapping[str, Tensor]) -> None:
        for name, own in values.items():
            self._held[name].index_copy_(0, slots, own)
        self._is_changed[slots] = True

    def _fetched(self, names: Iterable[str], rows: Tensor) -> Values:
        """Values of rows from where they are kept: one gather of each, and one copy to the device."""
        where = rows.cpu()
        is_pinned = self._device.type != "cpu"
        fetched = {}
        for name in names:
            kept = self._kept[name]
            room = torch.empty(
                len(where), kept.shape[1], dtype=kept.dtype, device="cpu", pin_memory=is_pinned
            )
            torch.index_select(kept, 0, where, out=room)
            fetched[name] = room.to(self._device, non_blocking=True)
        return fetched

    def _keep(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        where = rows.cpu()
        for name, own in values.items():
            self._kept[name].index_copy_(0, where, own.cpu())
