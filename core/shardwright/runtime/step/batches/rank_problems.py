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
        extras: texts on unused input of the batch; ``None`` if they are not to be compared.
    """

    text: str
    kind: type[ShardwrightError]
    extras: tuple[str, ...] | None

    @classmethod
    def of(cls, cause: Exception | None, extras: tuple[str, ...] | None) -> RankProblem:
        """The report of a rank whose batch caused an error, or, if ``cause`` is ``None``, no error."""
        if cause is None:
            return cls("", InvalidInputError, extras)
        if isinstance(cause, BatchProblem):
            return cls(str(cause), kind_of(cause), extras)
        return cls(f"its batch could not be had: {type(cause).__name__}: {cause}", DistributedError, extras)


def raise_problems(
    statuses: Sequence[Status], extra_words: Sequence[int], communicator: Communicator, own: RankProblem
) -> None:
    """Raise the problems of any rank's batch, with the same text on every rank.

    Args:
        statuses: status word of each rank, ``[W]``.
        extra_words: checksum of each rank's unused input, ``[W]``; 0: not to be compared.
        communicator: communicator that exchanges the texts, if there are any.
        own: this rank's report.

    Raises:
        InvalidInputError: batches are wrong.
        IdRangeError: batches are wrong by ids that are no rows, and by nothing else.
        DistributedError: a rank failed for another reason.
    """
    compared = {word for word in extra_words if word}
    if len(compared) < 2 and not any(status.is_problem for status in set(statuses)):
        return
    told: list[RankProblem] = communicator.all_gather_objects(own)
    names = communicator.global_ranks
    texts = [f"rank {rank}: {other.text}" for rank, other in zip(names, told, strict=True) if other.text]
    kind = kind_of_all(other.kind for other in told if other.text)
    raise kind("; ".join(texts or _not_on_all(told, names)))


def kind_of(error: Exception) -> type[ShardwrightError]:
    """The class by which other ranks raise an error of a batch."""
    own = [kind for kind in (IdRangeError, InvalidInputError) if isinstance(error, kind)]
    return own[0] if own else DistributedError


def kind_of_all(kinds: Iterable[type[ShardwrightError]]) -> type[ShardwrightError]:
    """The class of errors of several ranks: theirs if it is one; of wrong input without errors."""
    found = set(kinds) or {InvalidInputError}
    if len(found) == 1:
        return found.pop()
    return DistributedError if DistributedError in found else InvalidInputError


def _not_on_all(told: Sequence[RankProblem], names: Sequence[int]) -> list[str]:
    """Texts on unused input that only some ranks' batches have."""
    having: dict[str, list[int]] = {}
    for rank, other in zip(names, told, strict=True):
        for extra in other.extras or ():
            having.setdefault(extra, []).append(rank)
    compared = [rank for rank, other in zip(names, told, strict=True) if other.extras is not None]
    return [
        f"rank {ranks[0]}: {extra}. Of {len(told)} ranks' batches only that of {name_ranks(ranks)} "
        "has it: leave it out, or put it into the batches of all ranks"
        for extra, ranks in having.items()
        if ranks != compared
    ]
