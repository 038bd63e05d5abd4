"""Calls that all ranks make together: they come to it, give the same, and end it well, or all raise.

An error on one rank alone would leave the others waiting for it. So it is made known to them, and they raise one of the
same class.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, final

from attrs import frozen

from shardwright import errors
from shardwright.errors import DistributedError, ShardwrightError
from shardwright.host.fingerprint import name_ranks


class Ranks(ABC):
    """The ranks that share a model, as one of them sees them, beside their collectives."""

    @abstractmethod
    def meet(self, what: str, word: str = "") -> bool:
        """Return when every rank makes this call; true if all make it with the same arguments.

        Args:
            what: name of the call, for errors.
            word: text that must be the same on all ranks.

        Raises:
            ShardwrightError: another rank failed; or did not come in time, which is named.
        """

    @abstractmethod
    def together(self, what: str) -> AbstractContextManager[bool]:
        """A context for work of every rank: all end it well, or all raise soon after one does.

        It gives true where it is in no other such context. What is checked on each rank alone is followed by
        :meth:`meet` before the next collective: so the collectives can be used after an error.

        Args:
            what: name of the work, for the errors of ranks that did not fail.

        Raises:
            ShardwrightError: another rank failed: an error of the same class, with its text.
        """

    @abstractmethod
    def busy(self) -> AbstractContextManager[None]:
        """A context for work of this rank while the others wait in :meth:`meet`, as long as it takes."""


@final
class LoneRank(Ranks):
    """A rank that waits for nobody."""

    def meet(self, what: str, word: str = "") -> bool:  # noqa: D102 - described in the base class
        return True

    def together(self, what: str) -> AbstractContextManager[bool]:  # noqa: D102
        return nullcontext(False)

    def busy(self) -> AbstractContextManager[None]:  # noqa: D102
        return nullcontext()


@frozen
class Failure:
    """A rank's failure, as the others hear of it.

    Args:
        rank: number of the rank in the job.
        kinds: names of the error's class and those that it is derived from.
        text: the error's text.
        facts: the error's attributes by name, if it is one of shardwright's.
    """

    rank: int
    kinds: tuple[str, ...]
    text: str
    facts: Mapping[str, Any] = {}

    @classmethod
    def of(cls, rank: int, error: BaseException, longest: int | None = None) -> Failure:
        """The failure of a rank that raised an error, with so much of its text."""
        facts = error.facts if isinstance(error, ShardwrightError) else {}
        return cls(rank, tuple(kind.__name__ for kind in type(error).__mro__), str(error)[:longest], facts)

    @classmethod
    def read(cls, text: str) -> Failure:
        """Read a failure that was written as text."""
        rank, kinds, said, facts = json.loads(text)
        return cls(rank, tuple(kinds), said, facts)

    def __str__(self) -> str:
        return json.dumps([self.rank, self.kinds, self.text, dict(self.facts)], default=str)

    def error(self, rank: int, what: str) -> ShardwrightError:
        """The error of a rank that heard of this failure: of the same class, if that is one of shardwright's."""
        known = (getattr(errors, name) for name in self.kinds if name in errors.__all__)
        kind: type[ShardwrightError] = next(known, DistributedError)
        text = f"rank {rank}: {what} failed: rank {self.rank} raised {self.kinds[0]}: {self.text}"
        return kind(text, **self.facts)


def check_alike(what: str, told: Sequence[Mapping[str, Any]], names: Sequence[int], advice: str) -> None:
    """Check that all ranks gave the same values.

    Args:
        what: name of the call.
        told: values of each rank by name.
        names: numbers of the ranks.
        advice: advice for an error, if they differ.

    Raises:
        DistributedError: naming the first value that differs, and what it is on which ranks; ``subject`` has the name.
    """
    texts = {
        name: [str(values.get(name, "missing")) for values in told]
        for name in dict.fromkeys(chain.from_iterable(told))
    }
    different = [name for name, own in texts.items() if len(set(own)) > 1]
    if different:
        more = f" ({len(different)} of {len(texts)} differ)" if len(texts) > 1 else ""
        first = f"{different[0]} is {by_rank(texts[different[0]], names)}"
        raise DistributedError(
            f"the ranks differ in {what}: {first}{more}. {advice}", subject=different[0], asked=what
        )


def is_lost(error: BaseException) -> bool:
    """True if a collective failed, so that further ones would fail too, or wait for their time-out."""
    return isinstance(error, DistributedError) and isinstance(error.__cause__, RuntimeError)


def by_rank(texts: Sequence[str], names: Sequence[int] | None = None, *, between: str = ": ") -> str:
    """Join the ranks' texts as ``ranks 0, 1: text; rank 2: another``, without full stops between them.

    Args:
        texts: text of each rank, in rank order.
        names: numbers to name the ranks by; their places in ``texts`` by default.
        between: separator between ranks and text.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in zip(names or range(len(texts)), texts, strict=True):
        ranks.setdefault(text, []).append(rank)
    told = [f"{name_ranks(own)}{between}{text}" for text, own in ranks.items()]
    return "; ".join([*(one.removesuffix(".") for one in told[:-1]), *told[-1:]])
