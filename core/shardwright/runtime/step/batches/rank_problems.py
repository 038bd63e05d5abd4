"""Problems of the ranks' batches, raised by every rank in the same step.

A word of the header tells that there is a problem, and costs nothing. Only then do the ranks exchange its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import frozen

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import DistributedError, IdRangeError, InvalidInputError, ShardwrightError
from shardwright.runtime.ranks.together import name_ranks
from shardwright.runtime.step.batches.inputs import BatchProblem, Status


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


def raise_problems(statuses: Sequence[Status], communicator: Communicator, own: RankProblem) -> None:
    """Raise the problems of any rank's batch, with the same text on every rank.

    Args:
        statuses: status word of each rank, ``[W]``.
        communicator: communicator that exchanges the texts, if there are any.
        own: this rank's report.

    Raises:
        InvalidInputError: batches are wrong.
        IdRangeError: batches are wrong by ids that are no rows, and by nothing else.
        DistributedError: a rank failed for another reason.
    """
    if not any(status.is_problem for status in set(statuses)):
        return
    told: list[RankProblem] = communicator.all_gather_objects(own)
    names = communicator.global_ranks
    texts = [f"rank {rank}: {other.text}" for rank, other in zip(names, told, strict=True) if other.text]
    kind = kind_of_all(other.kind for other in told if other.text)
    raise kind("; ".join(texts))


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
