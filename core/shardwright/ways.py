"""Ways of the library that a layer with another library's names may choose for the process."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Ways", "take_ways", "ways"]


@dataclass
class Ways:
    """Choices that change no result of a lookup in given weights.

    Attributes:
        text_end: end of `str()` of a sparse type.
        checks_late: batches that contradict themselves can be made, and are refused where their bags are put together
            anew or looked up. They are refused when they are made otherwise. Offsets of 0 elements are taken for those
            of no bags.
        draws_twice: a table's weights are drawn normally before they are drawn as configured, as `torch.nn.Embedding`
            does, so that equal seeds give equal weights.
        input_error: the class of errors about arguments that are made; a subclass of ``InvalidInputError``, which is
            made otherwise.
    """

    text_end: str = ""
    checks_late: bool = False
    draws_twice: bool = False
    input_error: type[Exception] | None = None


ways = Ways()
"""The ways of this process."""


def take_ways(chosen: Ways) -> None:
    """Have the whole process go by other ways from now on; ``take_ways(Ways())`` is back to shardwright's own."""
    vars(ways).update(vars(chosen))
