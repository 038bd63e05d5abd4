"""Status words and problems of the ranks' batches, which every rank raises in the same step.

A word of the header tells that there is a problem, and costs nothing. Only then do the ranks exchange its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from attrs import frozen

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import DistributedError, IdRangeError, InvalidInputError, ShardwrightError
from shardwright.host.fingerprint import name_ranks
from shardwright.runtime.ranks.together import by_rank


class Status(IntEnum):
    """The status word of a rank's batch in its header."""

    FINE = 0
    BAD_INPUT = 1
    FAILED = 2
    NO_BATCH = 3  # its data has ended, and it takes no further part
    EMPTY_BATCH = 4  # its data has ended, and it goes on with empty batches
    STOPPED = 5  # the step before this batch's failed there


def goes_on(statuses: Sequence[Status]) -> bool:
    """True if the ranks train on these batches: all take part, and at least one has examples."""
    said = set(statuses)
    return not said & {Status.NO_BATCH, Status.STOPPED} and bool(said - {Status.EMPTY_BATCH})


class BatchProblem(InvalidInputError):
    """A problem of a rank's batch; every rank raises it, with the rank before the text."""


class IdProblem(BatchProblem, IdRangeError):
    """Likewise, of an id that is no row of its table."""


@frozen
class RankProblem:
    """A rank's report on its batch, exchanged when some rank has a problem.

    Args:
        text: description of the problem; empty if there is none.
        kind: class of the error that it is: ``InvalidInputError`` or ``IdRangeError`` if the batch is wrong.
    """

    text: str
    kind: type[ShardwrightError]

    @classmethod
    def of(cls, cause: Exception | None) -> RankProblem:
        """The report of a rank whose batch caused an error, or, if ``cause`` is ``None``, no error."""
        if cause is None:
            return cls("", InvalidInputError)
        if isinstance(cause, BatchProblem):
            return cls(str(cause), kind_of(cause))
        return cls(f"its batch could not be had: {type(cause).__name__}: {cause}", DistributedError)


def raise_problems(statuses: Sequence[Status], communicator: Communicator, cause: Exception | None) -> None:
    """Raise the problems of any rank's batch, with the same text on every rank.

    Args:
        statuses: status word of each rank, ``[W]``.
        communicator: communicator that exchanges the texts, if there are any.
        cause: error of this rank's batch, if there was one.

    Raises:
        InvalidInputError: batches are wrong.
        IdRangeError: batches are wrong by ids that are no rows, and by nothing else.
        DistributedError: a rank failed for another reason.
        Exception: the cause itself, on the rank that failed by it.
    """
    if not {Status.BAD_INPUT, Status.FAILED} & set(statuses):
        return
    try:
        told: list[RankProblem] = communicator.all_gather_objects(RankProblem.of(cause))
        wrong = [(rank, own) for rank, own in zip(communicator.global_ranks, told, strict=True) if own.text]
        text = by_rank([own.text for _, own in wrong], [rank for rank, _ in wrong])
        raise kind_of_all(own.kind for _, own in wrong)(text)
    except Exception:
        if cause is None or isinstance(cause, BatchProblem):
            raise
        raise cause from None  # here it says more than its text


def kind_of(error: Exception) -> type[ShardwrightError]:
    """The class by which other ranks raise an error of a batch."""
    own = [kind for kind in (IdRangeError, InvalidInputError) if isinstance(error, kind)]
    return own[0] if own else DistributedError


def kind_of_all(kinds: Iterable[type[ShardwrightError]]) -> type[ShardwrightError]:
    """The class of errors of several ranks: theirs if it is one; of different ones one that covers them."""
    found = set(kinds)
    if len(found) == 1:
        return found.pop()
    return DistributedError if DistributedError in found else InvalidInputError


def who_ended(statuses: Sequence[Status], names: Sequence[int] | None = None) -> str:
    """Name the ranks that do not go on, and the reason.

    Args:
        statuses: status word of each rank, ``[W]``.
        names: global ranks to name them by, ``[W]``; by default their places in ``statuses``.
    """
    names = names or range(len(statuses))
    stopped = [rank for rank, status in zip(names, statuses, strict=True) if status is Status.STOPPED]
    if stopped:
        return f"{name_ranks(stopped)} failed in the forward pass of this step or the last; the error there says why"
    ended = [
        rank
        for rank, status in zip(names, statuses, strict=True)
        if status in (Status.NO_BATCH, Status.EMPTY_BATCH)
    ]
    return f"the data of {name_ranks(ended)} has ended"
