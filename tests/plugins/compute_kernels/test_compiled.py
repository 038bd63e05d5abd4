"""Code that Numba compiled is kept on disk so that ranks may start and compile together, after any upgrade."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.programs import printed_by

pytest.importorskip("numba")

IMPORT = "from shardwright_plugins.kernel_parts.by_numba import compiled"
SOURCE = f"""\
{IMPORT}

inner = compiled(lambda x: x + {{added}})
outer = compiled(lambda x: inner(x) * 2)
"""
CALL = "import loops; print(loops.outer({}), sum(loops.outer.stats.cache_hits.values()))"
# A rank that has written Numba's index, and not yet the code.
HALF_WAY = "from numba.core.caching import IndexDataCacheFile as I; I._save_data = lambda *args: None; "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, added=1)
    return tmp_path


def write(folder: Path, added: int) -> None:
    """Write the loops; lines, and so the names of Numba's files, are the same whatever they add."""
    (folder / "loops.py").write_text(SOURCE.format(added=added))
    os.utime(folder / "loops.py", (added, added))


def run(folder: Path, program: str) -> str:
    """Run a program in a process of its own beside the loops; what it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    environment.pop("NUMBA_CACHE_DIR", None)
    return printed_by("-c", program, env=environment, timeout=120).strip()


def files(folder: Path) -> list[Path]:
    found = sorted((folder / "__pycache__").glob("loops.*.nbc"))
    assert found
    return found


@pytest.mark.slow
def test_code_of_two_types_is_compiled_once(folder: Path) -> None:
    for value, result in [(20, "42"), (20.5, "43.0")]:
        assert [run(folder, CALL.format(value)) for _ in range(2)] == [f"{result} 0", f"{result} 1"]
    assert len(files(folder)) == 4


@pytest.mark.parametrize(
    "before", [pytest.param("", marks=pytest.mark.slow), HALF_WAY], ids=["whole", "half way"]
)
def test_code_of_another_source_is_not_loaded(folder: Path, before: str) -> None:
    assert run(folder, CALL.format(20)) == "42 0"
    write(folder, added=5)
    assert run(folder, before + CALL.format(20)) == "50 0"
    assert run(folder, CALL.format(20)).startswith("50 ")


def test_code_of_another_source_beside_it_is_not_loaded(folder: Path) -> None:
    inner, outer = SOURCE.split("\n\n")[1].splitlines()
    (folder / "loops.py").write_text(f"{IMPORT}\nfrom parts import inner\n{outer}\n")
    for added, result in [(1, "42"), (5, "50")]:
        (folder / "parts.py").write_text(f"{IMPORT}\n{inner.format(added=added)}\n")
        os.utime(folder / "parts.py", (added, added))
        assert run(folder, CALL.format(20)) == f"{result} 0"


@pytest.mark.slow
def test_code_of_another_numba_is_not_loaded(folder: Path) -> None:
    assert run(folder, "import numba; numba.__version__ = '0.1'; " + CALL.format(20)) == "42 0"
    for file in files(folder):  # in a form that this one cannot read
        file.write_bytes(file.read_bytes()[:80] + b"another form")
    assert run(folder, HALF_WAY + CALL.format(20)) == "42 0"
    assert run(folder, CALL.format(20)).startswith("42 ")


@pytest.mark.slow
def test_file_that_was_cut_off_is_compiled_anew(folder: Path) -> None:
    run(folder, CALL.format(20))
    for file in files(folder):
        file.write_bytes(file.read_bytes()[:5])
    assert [run(folder, CALL.format(20)) for _ in range(2)] == ["42 0", "42 1"]
