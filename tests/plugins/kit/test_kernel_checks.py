"""The kit's look at the times that a kernel tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.plugins import broken

import shardwright as sw
from shardwright_testing.kernels.kernel_checks import check_times

REQUEST = sw.KernelRequest("cpu", sw.DataType.FP32, 8, 8)


def check_what_is_told(answer: Any) -> None:
    check_times(broken.answering(broken.Kernel, "times_ms", lambda request, work: answer(work)), REQUEST)


def test_check_times_refuses_one_array_of_both_times() -> None:
    check_what_is_told(lambda work: (work.ids, work.vectors))
    with pytest.raises(AssertionError, match="not a pair of arrays"):
        check_what_is_told(lambda work: np.stack([work.ids, work.vectors]))


def test_check_times_gives_work_that_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        check_what_is_told(lambda work: (np.multiply(work.ids, 2, out=work.ids), work.vectors))
