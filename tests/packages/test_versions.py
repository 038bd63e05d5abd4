"""Versions of dependencies: the bounds are stated, and those with which the tests passed are in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.packages import versions

TESTED = {
    requirement.name: Version(next(iter(requirement.specifier)).version)
    for requirement in map(Requirement, versions.TESTED.read_text().splitlines())
}


@pytest.mark.parametrize("project", versions.PROJECTS, ids=lambda path: path.parent.name)
def test_lowest_version_of_each_dependency_is_one_that_it_may_have(project: Path) -> None:
    lowest = versions.lowest()
    for requirement in versions.requirements(project):
        assert lowest[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("project", versions.PROJECTS[1:], ids=lambda path: path.parent.name)
def test_distributions_beside_state_the_lowest_versions_that_are_tested(project: Path) -> None:
    """One that allowed older ones would allow what no run of the tests has seen."""
    lowest = versions.lowest()
    stated = {
        canonicalize_name(each.name): versions.lower_bound(each) for each in versions.requirements(project)
    }
    assert stated == {name: lowest[name] for name in stated}


def test_tested_versions_are_those_of_all_dependencies_and_allowed() -> None:
    needed = {canonicalize_name(each.name): each for each in versions.requirements(versions.PROJECTS[0])}
    assert set(needed) <= set(TESTED)
    assert [name for name, each in needed.items() if TESTED[name] not in each.specifier] == []


def test_dependency_without_a_lower_bound_is_refused() -> None:
    assert versions.lower_bound(Requirement("torch>=2.13,<3")) == Version("2.13")
    with pytest.raises(ValueError, match="torch"):
        versions.lower_bound(Requirement("torch<3"))


def test_installed_versions_are_of_all_that_is_needed() -> None:
    here = versions.installed()
    assert {"attrs", "hypothesis", "numpy", "torch", "sympy"} <= set(here)
    assert "shardwright" not in here
