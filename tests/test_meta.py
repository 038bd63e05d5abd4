"""Rules about the project itself: what must be documented, tested, sorted and independent."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import hypothesis
import pytest
from tests import readme
from tests.programs import printed_by

import shardwright
import shardwright_testing as testing
from shardwright import contracts, hookspecs
from shardwright.cli.plugins import page_of
from shardwright.hookspecs import KINDS

ROOT = Path(__file__).parents[1]
TEMPLATES = "plugins/shardwright_plugins/commands/new_plugin/templates"
# Strings in core that are equal to the name of a built-in and mean something else, and what they mean.
HOMONYMS = {
    ("core/shardwright/optim/fused.py", "fused"): "a keyword of torch's own optimizers",
    **{
        (
            "core/shardwright/planning/tables/optimizers.py",
            name,
        ): "a name of FBGEMM's, which has other spellings"
        for name in ("sgd", "adagrad", "row_wise_adagrad", "adam", "partial_row_wise_adam", "lars")
    },
}
# Words that leave a docstring's reader to find the noun, and an argument without a subject.
QUESTION = re.compile(r"(What|Whether|How|Where|Which|Who|Whose|When|Why|That|If)\b")
DANGLING = re.compile(
    r"(of|by|for|in|on|at|to|from|with|as|that|which|what|whose|how|where|whether|if|is|are)\b"
)
# Most modules of a folder beside its ``__init__``: more of them want inner walls, by subject.
MOST_MODULES = 15
# Folders with more, and why.
CROWDED: dict[str, str] = {}
# Most lines of a file: a longer one is about several things, each of which has a name.
MOST_LINES = 400
HOOKS = sorted(name for name in dir(hookspecs) if name.startswith("shardwright_"))


def python_files(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def trees():
    """The syntax trees of core and plugins, by their paths from the root."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in python_files("core", "plugins")
    }


@pytest.fixture(scope="module")
def core(trees):
    """Those of core."""
    return {path: tree for path, tree in trees.items() if path.startswith("core/")}


def test_hooks_are_those_of_the_kinds():
    assert sorted(kind.hook for kind in KINDS) == HOOKS


def test_page_on_plugins_has_hooks_and_pages_of_the_kinds():
    """After a change of kinds: `python -m tests.readme`."""
    text = readme.PLUGINS.read_text()
    assert text == readme.with_kinds(text)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind_has_all_that_belongs_to_it(kind):
    """Its hook, contract, class of tests, files to begin with, and page: all that its row names."""
    module, _, kit = kind.kit.rpartition(".")
    assert getattr(contracts, kind.contract.__name__) is kind.contract
    assert getattr(importlib.import_module(f"shardwright_testing.{module}"), kit) is getattr(testing, kit)
    assert (ROOT / TEMPLATES / kind.template / "__init__.py.txt").is_file()
    assert page_of(kind).is_file()


def test_no_folder_is_crowded():
    counted = Counter(
        str(path.parent.relative_to(ROOT))
        for path in python_files("core", "plugins", "contrib", "tests")
        if path.name != "__init__.py"
    )
    crowded = {folder: number for folder, number in counted.items() if number > MOST_MODULES}
    assert {folder: number for folder, number in crowded.items() if folder not in CROWDED} == {}
    assert CROWDED.keys() <= crowded.keys(), "an exception is not one any more"


def test_no_file_is_long():
    counted = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in python_files("core", "plugins", "contrib")
    }
    assert {path: number for path, number in counted.items() if number > MOST_LINES} == {}


def test_no_property_is_held_to_a_deadline():
    assert hypothesis.settings.default.deadline is None


def test_public_names_are_sorted_and_unique():
    assert shardwright.__all__ == sorted(set(shardwright.__all__))


def test_core_names_no_built_in_plugin(core):
    """No string in core is the name of something that a built-in plugin offers."""
    names = {
        entry.name
        for record in shardwright.host.PluginHost(environment={}).plugins
        if record.provenance.distribution == "shardwright"
        for entries in record.entries.values()
        for entry in entries
    }
    found = {
        (path, node.value): node.lineno
        for path, tree in core.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }
    assert {place: line for place, line in found.items() if place not in HOMONYMS} == {}


def test_built_ins_come_in_by_entry_points_and_load():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["shardwright"]
    host = shardwright.host.PluginHost(environment={})
    records = {
        record.provenance.plugin: record
        for record in host.plugins
        if record.provenance.distribution == "shardwright"
    }
    assert {name: record.provenance.module for name, record in records.items()} == declared
    assert {name: record.reason for name, record in records.items() if record.state != "loaded"} == {}


@pytest.mark.slow
def test_plugin_host_tests_pass_with_no_plugin_loaded():
    """The convention for all of tests/core: they pass with SHARDWRIGHT_PLUGINS empty. CI runs them all so."""
    files = ["host", "test_hookspecs.py"]
    arguments = ["-q", "-n0", "-p", "no:cacheprovider", *[str(ROOT / "tests/core" / name) for name in files]]
    printed_by("-m", "pytest", *arguments, cwd=ROOT, env={**os.environ, "SHARDWRIGHT_PLUGINS": ""})


def test_no_two_classes_of_core_share_a_name(core):
    """One word for one thing, private or public: the glossary of CONTRIBUTING has the words."""
    places = defaultdict(list)
    for path, tree in core.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


@pytest.fixture(scope="module")
def docstrings(trees):
    """Docstrings of core and plugins with their places, those of attributes and constants too."""
    return [found for place, tree in trees.items() for found in docstrings_of(place, tree)]


def docstrings_of(place, tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for line in body if isinstance(body, list) else ():  # a lambda's is an expression
            text = getattr(getattr(line, "value", None), "value", None)
            if isinstance(line, ast.Expr) and isinstance(text, str):
                yield f"{place}:{line.lineno}", inspect.cleandoc(text)


def arguments_of(docstring):
    """Descriptions of the arguments or attributes in a docstring, by name."""
    found = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n(?=    ))*)", docstring, re.MULTILINE)
    return re.findall(r"^    (\w+): (.*)$", found[1], re.MULTILINE) if found else []


def test_docstrings_begin_with_a_noun_or_a_verb(docstrings):
    """Not "What the copies synchronise", but "Bytes that the copies synchronise": it can be read alone."""
    assert [f"{place}: {text.splitlines()[0]}" for place, text in docstrings if QUESTION.match(text)] == []


def test_arguments_name_their_subject(docstrings):
    """Not "limit: of each rank's load", but "limit: largest load of a rank, ms"."""
    dangling = [
        f"{place}: {name}: {text}"
        for place, docstring in docstrings
        for name, text in arguments_of(docstring)
        if DANGLING.match(text)
    ]
    assert dangling == []


# What of core holds from one call to the next for the whole process, and whose business that is.
STATE = {
    "host/plugin_host.py": {"_process_host"},
    "planning/tables/data_types.py": {"_NAMES"},  # a data type is one object of its name
    "host/process.py": {"_source"},  # what gives the plugin host
    "optim/fused.py": {"_REGISTERED"},  # torch's optimizers by class, as plugins register theirs
    # Of process groups and of models, by weak reference.
    "error_reports.py": {"_LISTENERS"},
    "runtime/ranks/environment.py": {"_LOCKSTEPS"},
    "runtime/ranks/group_ranks.py": {"_known"},
    "runtime/sharded/tables/table_state.py": {"_AS_BLOCKS"},
    # Checks of users' loops.
    "runtime/sharded/tables/data_parallel.py": {"_TAKEN_IN"},
}
HOLDERS = re.compile(r"(\{\}|\[.?\]|(dict|list|set|defaultdict|OrderedDict|Weak\w+|ContextVar|local)\(.*\))$")


def state_of(tree):
    """Names of a file that keep something for the process: rebound ones, and containers that begin empty."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
    for body in [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                if target.startswith("_") and HOLDERS.match(ast.unparse(node.value)) and target != "__all__":
                    yield target


def test_core_keeps_nothing_for_the_process_but_what_is_listed():
    core = ROOT / "core" / "shardwright"
    found = {
        str(path.relative_to(core)): set(state_of(ast.parse(path.read_text())))
        for path in python_files("core")
    }
    assert {path: names - STATE.get(path, set()) for path, names in found.items() if names} == {
        path: set() for path, names in found.items() if names
    }
