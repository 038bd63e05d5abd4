"""Both ways of computing: over FBGEMM's operators and in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardwright import _fbgemm


# Module-scoped, so that Hypothesis accepts it: nothing in it needs to be reset between examples.
@pytest.fixture(scope="module", params=["fbgemm", "torch"])
def ops_path(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(_fbgemm, "available", lambda: False)
        elif not _fbgemm.available():
            pytest.skip(f"FBGEMM is not available: {_fbgemm.reason()}")
        yield request.param
