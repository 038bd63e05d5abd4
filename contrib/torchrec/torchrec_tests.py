"""Unit tests of TorchRec on TorchRec and on shardwright: the tests that pass there, by what becomes of them here.

    python contrib/torchrec/torchrec_tests.py FOLDER --torchrec /path/to/a/python/with/torchrec

`FOLDER` has files `test_*.py` of `unittest` classes. Each file runs in a process of its own on each side. A name that
shardwright does not have stands in for itself, and fails the tests that use it, so that a file is measured although one
of its imports is missing. Modules `torchrec...test_utils`, which tests share, are TorchRec's own on both sides.
Processes that tests start import the file's module and TorchRec's names as the file's own process does.
A file that does not run to its end on one of the sides is told with the reason: it gives no outcomes there.
All of a library's files take hours: `--keep` keeps the outcomes of each file, and a later run goes on from there.

A test is one of *internals* if it reads an attribute or imports a name that begins with an underscore, or imports a
module of `INTERNALS`. These are counted apart: nobody promises them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import unittest
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INTERNALS = (
    "torchrec.distributed.dist_data",
    "torchrec.distributed.embedding_kernel",
    "torchrec.distributed.embedding_lookup",
    "torchrec.distributed.embedding_sharding",
    "torchrec.distributed.sharding.",
    "torchrec.distributed.tests.",
    "torchrec.ir.",
    "torchrec.pt2.",
    "torchrec.schema.",
    "torchrec.sparse.tests.",
)
PASSES, ABSENT, SIGNATURE, BEHAVIOUR, INTERNAL = (
    *("passes", "lacks a name", "differs in signature"),
    *("differs in behaviour", "tests internals"),
)
_MARK = "outcomes: "
_SIDE = "TORCHREC_TESTS_SIDE"
"""Variable that tells processes of tests the side, the file and the folder of the test support, as JSON."""


class MissingName(Exception):
    """A name of TorchRec's that is not here was used."""


class NoOutcomesError(Exception):
    """A file's tests did not run to their end."""


class Missing:
    """Stand-in for a name that is not here: a base class, an annotation or a default, but nothing to call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return ()

    def __getitem__(self, parameters: Any) -> Missing:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing: the name is not here."""
        raise MissingName(self._name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")


def lenient(source: str, path: str) -> ast.Module:
    """A module's code in which each import from TorchRec that fails gives a stand-in."""

    class Imports(ast.NodeTransformer):
        def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
            if not (node.module or "").startswith("torchrec"):
                return node
            lines = [
                f"{one.asname or one.name} = __import__('builtins')._torchrec_name({node.module!r}, {one.name!r})"
                for one in node.names
            ]
            return [ast.copy_location(line, node) for line in ast.parse("\n".join(lines)).body]

    return ast.fix_missing_locations(Imports().visit(ast.parse(source, path)))


def torchrec_name(module: str, name: str) -> Any:
    """A name of one of TorchRec's modules, or its stand-in."""
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")
    except (ImportError, AttributeError):
        return Missing(f"{module}.{name}")


class Support(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves a file of tests, and the modules that tests share from an installed TorchRec."""

    def __init__(self, root: Path, file: Path) -> None:
        self.root, self.file = root, file

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of the file's module, and of `torchrec...test_utils` and what is below it."""
        if name == self.file.stem:
            return importlib.util.spec_from_loader(name, self, origin=str(self.file))
        parts = name.split(".")
        if parts[0] != "torchrec" or "test_utils" not in parts:
            return None
        place = self.root.joinpath(*parts[1:])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        return importlib.util.spec_from_loader(name, self, origin=str(file), is_package=place.is_dir())

    def exec_module(self, module: Any) -> None:
        """Run the module's code, with stand-ins for what is not here."""
        file = module.__spec__.origin
        exec(compile(lenient(Path(file).read_text(), file), file, "exec"), vars(module))


class Outcomes(unittest.TestResult):
    """The outcome of each test: empty if it passed, else the error's class and text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: D102 - unittest's
        self.found.setdefault(name_of(test), None)

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: D102
        self.found[name_of(test)] = [err[0].__name__, str(err[1])[:300]]

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: D102
        if err is not None:
            self.addError(test, err)

    addFailure = addError


def name_of(test: unittest.TestCase) -> str:
    """Class and method of a test."""
    return ".".join(test.id().split(".")[-2:])


def prepare(side: str, file: str, support: str) -> None:
    """Let this process import a file of tests, and the test support of the TorchRec in a folder."""
    import builtins

    if side == "shardwright":
        from shardwright_torchrec import install

        install()
    sys.meta_path.insert(0, Support(Path(support), Path(file)))
    vars(builtins)["_torchrec_name"] = torchrec_name


def run(side: str, file: Path, support: Path) -> dict[str, Any]:
    """Run the tests of a file in this process, with the test support of the TorchRec in a folder."""
    given = [side, str(file.resolve()), str(support)]
    os.environ[_SIDE] = json.dumps(given)
    prepare(*given)
    outcomes = Outcomes()
    unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(file.stem)).run(outcomes)
    return outcomes.found


def outcomes(side: str, python: str, file: Path, support: Path, seconds: float) -> dict[str, Any]:
    """The outcomes of a file's tests in a process of an interpreter.

    Raises:
        NoOutcomesError: the process takes too long, or ends without.
    """
    command = [python, __file__, str(file), "--run", side, "--support", str(support)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            told, complaints = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise NoOutcomesError(f"took more than {seconds:g} s; --seconds gives it more") from None
        finally:  # with the processes that its tests left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in told.splitlines() if line.startswith(_MARK)]
    if not lines:
        last = complaints.strip().splitlines()[-1:]
        raise NoOutcomesError(f"ended with {process.returncode}: {''.join(last)[:150]}")
    return dict(json.loads(lines[-1].removeprefix(_MARK)))


def internal_tests(source: str) -> set[str]:
    """Tests of a module that use what TorchRec keeps to itself."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = {
        one.asname or one.name
        for node in imports
        if (node.module or "").startswith("torchrec")
        for one in node.names
        if one.name.startswith("_") or f"{node.module}.".startswith(INTERNALS)
    }
    helpers = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("Test")
        and _uses(node, own)
    }
    return {
        f"{group.name}.{test.name}"
        for group in tree.body
        if isinstance(group, ast.ClassDef)
        for test in group.body
        if isinstance(test, ast.FunctionDef) and _uses(test, own | helpers)
    }


def _uses(code: ast.AST, names: set[str]) -> bool:
    return any(
        _is_private(node) or (isinstance(node, ast.Name) and node.id in names) for node in ast.walk(code)
    )


def _is_private(node: ast.AST) -> bool:
    """True for `something._x`, unless the test itself has it, or Python."""
    if isinstance(node, ast.ImportFrom):
        return any(one.name.startswith("_") for one in node.names)
    if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "torch"))


def kind(error: list[str] | None) -> str:
    """The class of an outcome: an error's class and text, or none."""
    if error is None:
        return PASSES
    name, text = error
    if name in ("MissingName", "ImportError", "ModuleNotFoundError") or (
        name == "AttributeError" and "is shardwright here" in text
    ):
        return ABSENT
    is_call = name == "TypeError" and any(
        word in text for word in ("unexpected keyword", "positional argument")
    )
    return SIGNATURE if is_call else BEHAVIOUR


@dataclass
class Measured:
    """Outcome of a folder's tests.

    Attributes:
        files: number of files.
        tests: number of tests that ran with TorchRec.
        found: each test that passes with TorchRec -> its class and the error here.
        not_there: files that did not run with TorchRec -> the reason.
        not_here: files that ran there and not here -> the reason.
    """

    files: int = 0
    tests: int = 0
    found: dict[str, tuple[str, Any]] = field(default_factory=dict)
    not_there: dict[str, str] = field(default_factory=dict)
    not_here: dict[str, str] = field(default_factory=dict)


def measure(folder: Path, python: str, seconds: float, keep: Path | None = None) -> Measured:
    """Run the tests of all files on both sides; outcomes that are kept are taken from there."""
    where = "import torchrec; print(torchrec.__path__[0])"
    support = Path(subprocess.check_output([python, "-c", where], text=True).strip().splitlines()[-1])
    measured = Measured()
    for file in sorted(folder.rglob("test_*.py")):
        measured.files += 1
        name = str(file.relative_to(folder))
        theirs = kept(keep, name, "torchrec", python, file, support, seconds)
        if isinstance(theirs, str):
            measured.not_there[name] = theirs
            continue
        measured.tests += len(theirs)
        internal = internal_tests(file.read_text())
        ours: dict[str, Any] | str = {}
        if any(error is None and test not in internal for test, error in theirs.items()):
            ours = kept(keep, name, "shardwright", sys.executable, file, support, seconds)
        if isinstance(ours, str):
            measured.not_here[name], ours = ours, {}
        measured.found |= classes(name, theirs, ours, internal)
    return measured


def kept(folder: Path | None, name: str, side: str, *run: Any) -> dict[str, Any] | str:
    """Outcomes of a file's tests, or the reason why there are none; from the folder where it has them."""
    place = folder and folder / f"{side}.{name.replace('/', '.')}.json"
    if place is not None and place.exists():
        found: dict[str, Any] | str = json.loads(place.read_text())
        return found
    try:
        found = outcomes(side, *run)
    except NoOutcomesError as error:
        found = str(error)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(found))
    return found


def classes(
    file: str, theirs: dict[str, Any], ours: dict[str, Any], internal: set[str]
) -> dict[str, tuple[str, Any]]:
    """Each test of a file that passes with TorchRec -> its class and the error here."""
    found: dict[str, tuple[str, Any]] = {}
    for test in (name for name, error in theirs.items() if error is None):
        error = ours.get(test, ["NoOutcomesError", "the test did not run"])
        found[f"{file}::{test}"] = (INTERNAL if test in internal else kind(error), error)
    return found


def main() -> None:
    """Print the population, what is counted out, the classes with their numbers, then the tests that do not pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the tests")
    parser.add_argument("--torchrec", default=sys.executable, help="interpreter that has TorchRec")
    parser.add_argument("--seconds", type=float, default=300, help="limit of a file's run on each side")
    parser.add_argument("--keep", type=Path, help="folder for the outcomes of each file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--support", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        found = run(options.run, options.folder, options.support)
        print(f"\n{_MARK}{json.dumps(found)}", flush=True)
        return
    report(measure(options.folder, options.torchrec, options.seconds, options.keep))


def report(measured: Measured) -> None:
    """Print what a folder's tests come to."""
    numbers = Counter(state for state, _ in measured.found.values())
    public = numbers.total() - numbers[INTERNAL]
    lines = {
        "files": measured.files,
        "that did not run with TorchRec": -len(measured.not_there),
        "tests that ran with TorchRec": measured.tests,
        "that do not pass there": numbers.total() - measured.tests,
        "that test internals": -numbers[INTERNAL],
        "tests that count": public,
        **{f"of them: {state}": numbers[state] for state in (PASSES, ABSENT, SIGNATURE, BEHAVIOUR)},
    }
    for line, number in lines.items():
        print(f"{line:32} {number:6}")
    print(f"\n{numbers[PASSES] / max(public, 1):.1%} of the tests that count pass\n")
    for test, (state, error) in measured.found.items():
        if state not in (PASSES, INTERNAL):
            print(f"{state:22} {test}\n{'':22} {': '.join(error).splitlines()[0][:150]}")
    for side, files in (("TorchRec", measured.not_there), ("shardwright", measured.not_here)):
        for file, reason in files.items():
            print(f"did not run with {side}: {file}\n{'':22} {reason}")


if __name__ == "__mp_main__" and _SIDE in os.environ:  # a process that a test started by `spawn`
    prepare(*json.loads(os.environ[_SIDE]))

if __name__ == "__main__":
    main()
