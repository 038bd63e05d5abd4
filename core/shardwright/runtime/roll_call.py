"""After a collective failed: which ranks came to it and failed as well, and of which there is no word.

A backend says at most that a connection was closed, or that time ran out, not whose fault it is. So each rank whose
collective fails writes that into the group's store, and looks who else did: a rank that was killed, or is stuck
elsewhere, does not. While nothing fails, nothing is written or read.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwright.last_words import Listener, listen
from shardwright.runtime.lockstep import name_ranks

_LONGEST_GRACE_S = 5.0
_POLL_S = 0.02
_LONGEST_WORD = 1000  # characters


class RollCall(Listener):
    """What the ranks of a process group tell each other of a failure, through the group's store.

    Args:
        process_group: the group.
        device: whose backend's time-out counts.

    Attributes:
        patience: how long a collective may take, so that the roll can be called inside the group's time-out; ``None``
            where waiting with a limit of its own would block a device's stream.
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        self._rank, self._world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._group, self._store = process_group, store_of(process_group)
        timeout_s = _timeout_of(process_group, device).total_seconds()
        self._grace_s = min(_LONGEST_GRACE_S, timeout_s / 4)
        self._patience = timedelta(seconds=timeout_s - self._grace_s)
        self.patience = self._patience if device.type == "cpu" else None
        self._timeout_s = timeout_s
        listen(self)

    def hear(self, text: str) -> None:
        """Leave a word in the store for those that may wait for this rank in vain; see :mod:`last_words`."""
        if (
            self._group not in dist.distributed_c10d._world.pg_map
        ):  # it was destroyed, and its store may be gone
            return
        with suppress(Exception):  # what is raised here is that error, not that the store is gone
            self._store.set(_word_key(self._rank), f"{time.time()} {text[:_LONGEST_WORD]}")

    def after(self, label: str) -> str:
        """Tell the others that ``label`` failed here, wait for their word, and say in a text what became of whom.

        Args:
            label: the collective.

        Returns:
            ``"no word from rank 1; rank 2 failed in ids"``; nothing where there is no store to ask.
        """
        try:
            told = self._exchange(label)
        except Exception:  # the rank that serves the store is gone, too
            return "the group's store does not answer"
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        missing = [rank for rank in others if rank not in told]
        parts = [f"no word from {name_ranks(missing)} in {self._grace_s:.1f} s"] if missing else []
        parts += [f"rank {rank} had raised {word}" for rank in missing if (word := self._last_word_of(rank))]
        for seen in dict.fromkeys(told.values()):
            parts.append(f"{name_ranks([rank for rank in told if told[rank] == seen])} failed in {seen}")
        return "; ".join(parts)

    def _last_word_of(self, rank: int) -> str:
        """What a rank raised of its batch since this rank may have begun to wait for it."""
        with suppress(Exception):
            if self._store.check([_word_key(rank)]):
                when, _, text = self._store.get(_word_key(rank)).decode().partition(" ")
                return text if time.time() - float(when) < 2 * self._timeout_s else ""
        return ""

    def meet(self, place: str, what: str) -> None:
        """Wait until every rank has come to ``place``, by the store alone; those that fail elsewhere hear of ``what``.

        The rank that leaves last takes what was written out of the store.

        Raises:
            RuntimeError: one did not in time.
        """
        count = f"shardwright/meeting/{place}"
        everybody = f"{count}/all"
        self._store.set(_key(self._rank), what)
        if self._store.add(count, 1) == self._world_size:
            self._store.set(everybody, "here")
        self._store.wait([everybody], self._patience)
        self._store.delete_key(_key(self._rank))
        if self._store.add(count, 1) == 2 * self._world_size:
            self._store.delete_key(everybody)
            self._store.delete_key(count)

    def _exchange(self, label: str) -> dict[int, str]:
        """What each other rank failed in, of those that say so before time is up."""
        self._store.set(_key(self._rank), label)
        told: dict[int, str] = {}
        deadline = time.monotonic() + self._grace_s
        while True:
            for rank in range(self._world_size):
                if rank != self._rank and rank not in told and self._store.check([_key(rank)]):
                    told[rank] = self._store.get(_key(rank)).decode()
            if len(told) == self._world_size - 1 or time.monotonic() > deadline:
                return dict(sorted(told.items()))
            time.sleep(_POLL_S)


def _key(rank: int) -> str:
    return f"shardwright/failed/{rank}"


def _word_key(rank: int) -> str:
    return f"shardwright/word/{rank}"


def store_of(process_group: Any) -> Any:
    """A process group's own part of the store. torch has no public way to it."""
    return dist.distributed_c10d._world.pg_map[process_group][1]


def _timeout_of(process_group: Any, device: torch.device) -> timedelta:
    """How long the group's collectives may take; torch's default where its backend does not say."""
    backend = process_group._get_backend(device)
    options = getattr(backend, "options", None)
    timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
    return timeout
