"""What ranks have to say against their batches, so that every rank raises it in the same step.

That there is something is a word of the header, and costs nothing; only then do the ranks exchange its text.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import DistributedError, InvalidInputError
from shardwright.runtime.ranks.lockstep import name_ranks
from shardwright.runtime.step.inputs import BatchProblem, Status


@frozen
class RankProblem:
    """What a rank tells the others of its batch when some rank complains.

    Args:
        text: what is wrong, or nothing.
        is_input: the batch is wrong; else something else failed.
        extras: what its batch brings that is not looked at; ``None`` where that is not to be compared.
    """

    text: str
    is_input: bool
    extras: tuple[str, ...] | None

    @classmethod
    def of(cls, cause: Exception | None, extras: tuple[str, ...] | None) -> RankProblem:
        """What a rank has to say whose batch caused this error, or none."""
        if cause is None:
            return cls("", True, extras)
        is_input = isinstance(cause, BatchProblem)
        text = str(cause) if is_input else f"its batch could not be had: {type(cause).__name__}: {cause}"
        return cls(text, is_input, extras)


def raise_problems(
    statuses: Sequence[Status], extra_words: Sequence[int], communicator: Communicator, own: RankProblem
) -> None:
    """Raise what any rank has to say against its batch, the same text on every rank.

    Args:
        statuses: what each rank says of its batch.
        extra_words: for each rank, a number for what its batch brings that is not looked at; 0: not to be compared.
        communicator: exchanges the texts, where there are any.
        own: this rank's.

    Raises:
        InvalidInputError: batches are wrong.
        DistributedError: a rank failed for another reason.
    """
    compared = {word for word in extra_words if word}
    if len(compared) < 2 and not any(status.is_problem for status in set(statuses)):
        return
    told: list[RankProblem] = communicator.all_gather_objects(own)
    names = communicator.global_ranks
    texts = [f"rank {rank}: {other.text}" for rank, other in zip(names, told, strict=True) if other.text]
    failed = any(not other.is_input for other in told)
    raise (DistributedError if failed else InvalidInputError)("; ".join(texts or _not_on_all(told, names)))


def _not_on_all(told: Sequence[RankProblem], names: Sequence[int]) -> list[str]:
    """What is not looked at, and only some ranks' batches bring."""
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
