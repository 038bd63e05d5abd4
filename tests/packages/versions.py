"""Versions of dependencies that the tests are run with.

`python -m tests.packages.versions lowest` prints constraints for pip: the lowest version that each direct dependency of
the project and of `contrib` may have, as the project files state it.

`python -m tests.packages.versions tested` prints the versions that are installed here of all that the extras `cpu` and
`test` bring. `.ci/tested.txt` has those with which all tests passed last.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TESTED = ROOT / ".ci" / "tested.txt"
PROJECTS = (ROOT / "pyproject.toml", *sorted(ROOT.glob("contrib/*/pyproject.toml")))
EXTRAS = ("cpu", "demo", "test", "testing")
"""Extras of the project that are tested without a GPU. Those of ``contrib`` all are."""


def requirements(project: Path) -> Iterator[Requirement]:
    """Direct dependencies of a distribution on others, as its project file states them."""
    stated = tomllib.loads(project.read_text())["project"]
    extras = stated.get("optional-dependencies", {})
    chosen = [name for name in extras if name in EXTRAS or project != PROJECTS[0]]
    for text in [*stated["dependencies"], *(text for name in chosen for text in extras[name])]:
        requirement = Requirement(text)
        is_meant = requirement.marker is None or requirement.marker.evaluate()
        if is_meant and not requirement.name.startswith("shardwright"):
            yield requirement


def lower_bound(requirement: Requirement) -> Version:
    """The lowest version that a requirement allows.

    Raises:
        ValueError: it allows any.
    """
    bounds = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==")]
    if not bounds:
        raise ValueError(f"{requirement} has no lower bound, so that none is tested")
    return max(bounds)


def lowest() -> dict[str, Version]:
    """The lowest version of each direct dependency that all distributions of this project allow."""
    found: dict[str, Version] = {}
    for project in PROJECTS:
        for requirement in requirements(project):
            name, bound = canonicalize_name(requirement.name), lower_bound(requirement)
            found[name] = max(bound, found.get(name, bound))
    return dict(sorted(found.items()))


def installed() -> dict[str, Version]:
    """The version of each installed distribution that this one needs with the extras ``cpu`` and ``test``."""
    found: dict[str, Version] = {}
    waiting = [Requirement("shardwright[cpu,test]")]
    seen: set[tuple[str, str]] = set()
    while waiting:
        asked = waiting.pop()
        for extra in (asked.extras or set()) | {""}:
            name = canonicalize_name(asked.name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                found[name] = Version(metadata.version(name))
            except metadata.PackageNotFoundError:  # FBGEMM, beside another torch than it is built for
                continue
            needed = map(Requirement, metadata.requires(name) or [])
            waiting += [each for each in needed if not each.marker or each.marker.evaluate({"extra": extra})]
    del found["shardwright"]
    return dict(sorted(found.items()))


def main(which: str) -> None:
    """Print one of the sets, a line a distribution."""
    versions = {"lowest": lowest, "tested": installed}[which]()
    for name, version in versions.items():
        print(f"{name}=={version.public}")  # without the tag of a build, such as +cpu


if __name__ == "__main__":
    main(*sys.argv[1:])
