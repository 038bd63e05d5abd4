"""Stores need LMDB, which is no dependency of the project's."""

import pytest

pytest.importorskip("lmdb")
