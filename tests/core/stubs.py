"""What type checkers read of the packages whose names are imported on first use.

`python -m tests.core.stubs` writes the stubs anew, from the same table of names that the packages use.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import shardwright
import shardwright_testing as testing
from shardwright import host

PACKAGES: tuple[ModuleType, ...] = (shardwright, host, testing)

OWN_NAMES = sorted([*shardwright._MODULE_OF_NAME, "__version__"])
"""Public names that core brings itself; plugins bring the others."""


def path_of(package: ModuleType) -> Path:
    """The stub beside a package's `__init__.py`."""
    return Path(str(package.__file__)).with_suffix(".pyi")


def text_of(package: ModuleType) -> str:
    """A stub: every public name, from where it is."""
    lines = ["# Made by `python -m tests.core.stubs`."]
    for name in package.__all__:
        if name == "__version__":
            continue
        module = (
            package._MODULE_OF_NAME.get(name) or getattr(package, name).__module__
        )  # which a plugin brings
        if not module.startswith("shardwright"):
            module = f"{package.__name__}.{module}"
        lines.append(f"from {module} import {name} as {name}")
    if package is shardwright:
        lines.append("from shardwright import host as host")
    lines = [lines[0], *sorted(lines[1:]), ""]
    if "__version__" in package.__all__:
        lines.append("__version__: str")
    return "\n".join([*lines, "__all__: list[str]", ""])


def main() -> None:
    """Write the stubs."""
    for package in PACKAGES:
        path_of(package).write_text(text_of(package))


if __name__ == "__main__":
    main()
