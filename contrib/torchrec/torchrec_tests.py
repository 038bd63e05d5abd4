"""Unit tests of TorchRec on TorchRec and on shardwright: the tests that pass there, by what becomes of them here.

    python contrib/torchrec/torchrec_tests.py FOLDER --torchrec /path/to/a/python/with/torchrec

`FOLDER` has files `test_*.py` of `unittest` classes. Each file runs in a process of its own on each side. A name that
shardwright does not have stands in for itself, and fails the tests that use it, so that a file is measured although one
of its imports is missing. Modules `torchrec...test_utils`, which tests share, are TorchRec's own on both sides.
Tests that start processes are not counted: these cannot import a file's module, and so fail with TorchRec too.

A test is one of *internals* if it reads an attribute or imports a name that begins with an underscore, or imports a
module of `INTERNALS`. These are counted apart: nobody promises them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.util
import json
import subprocess
import sys
import unittest
from collections import Counter
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


class MissingName(Exception):
    """A name of TorchRec's that is not here was used."""


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
    """Serves the modules that tests share from an installed TorchRec."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of `torchrec...test_utils` and what is below it."""
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


def run(file: Path, support: Path, *, on_shardwright: bool) -> dict[str, Any]:
    """Run the tests of a file in this process, with the test support of the TorchRec in a folder."""
    import builtins

    if on_shardwright:
        from shardwright_torchrec import install

        install()
    sys.meta_path.insert(0, Support(support))
    vars(builtins)["_torchrec_name"] = torchrec_name
    module = importlib.util.module_from_spec(
        importlib.machinery.ModuleSpec(file.stem, None, origin=str(file))
    )
    sys.modules[file.stem] = module
    exec(compile(lenient(file.read_text(), str(file)), str(file), "exec"), vars(module))
    outcomes = Outcomes()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(outcomes)
    return outcomes.found


def outcomes(side: str, python: str, file: Path, support: Path, seconds: float) -> dict[str, Any]:
    """The outcomes of a file's tests in a process of an interpreter; none if it ends or takes too long."""
    command = [python, __file__, str(file), "--run", side, "--support", str(support)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {}
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    return dict(json.loads(lines[-1].removeprefix(_MARK))) if lines else {}


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


def measure(folder: Path, python: str, seconds: float) -> dict[str, tuple[str, Any]]:
    """Each test that passes with TorchRec -> its class and the error here."""
    where = "import torchrec; print(torchrec.__path__[0])"
    support = Path(subprocess.check_output([python, "-c", where], text=True).strip().splitlines()[-1])
    found: dict[str, tuple[str, Any]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        theirs = outcomes("torchrec", python, file, support, seconds)
        ours = outcomes("shardwright", sys.executable, file, support, seconds)
        internal = internal_tests(file.read_text())
        for test in (name for name, error in theirs.items() if error is None):
            error = ours.get(test, ["ImportError", "the file did not run"])
            state = INTERNAL if test in internal else kind(error)
            found[f"{file.relative_to(folder)}::{test}"] = (state, error)
    return found


def main() -> None:
    """Print the classes with their numbers, then the tests that do not pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the tests")
    parser.add_argument("--torchrec", default=sys.executable, help="interpreter that has TorchRec")
    parser.add_argument("--seconds", type=float, default=300, help="limit of a file's run on each side")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--support", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        found = run(options.folder, options.support, on_shardwright=options.run == "shardwright")
        print(f"\n{_MARK}{json.dumps(found)}", flush=True)
        return
    measured = measure(options.folder, options.torchrec, options.seconds)
    numbers = Counter(state for state, _ in measured.values())
    public = numbers.total() - numbers[INTERNAL]
    print(f"{numbers.total()} tests pass with TorchRec\n")
    for state in (PASSES, ABSENT, SIGNATURE, BEHAVIOUR, INTERNAL):
        print(f"{state:22} {numbers[state]:5}")
    print(f"\nof {public} tests of what is public {numbers[PASSES] / max(public, 1):.1%} pass\n")
    for test, (state, error) in measured.items():
        if state not in (PASSES, INTERNAL):
            print(f"{state:22} {test}\n{'':22} {': '.join(error).splitlines()[0][:150]}")


if __name__ == "__main__":
    main()
