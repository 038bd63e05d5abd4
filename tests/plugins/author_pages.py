"""The pages for authors: what a page says of a contract, made from the contract.

`python -m tests.plugins.author_pages` writes these parts of the pages anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwright
from shardwright.hookspecs import KINDS

FOLDER = Path(shardwright.__file__).parent / "docs" / "authors"
PAGES = {kind.name: kind for kind in KINDS}
"""Name of a page -> its kind."""

_CONTRACT = re.compile(r"(^```text contract\n).*?(^```$)", re.MULTILINE | re.DOTALL)


def page(name: str) -> Path:
    """The page of a kind."""
    return FOLDER / f"{name}.md"


def contract_text(contract: type) -> str:
    """Names, defaults and signatures of a contract: what `api` counts."""
    return "\n".join([f"class {contract.__name__}", *_attributes(contract), *_methods(contract)]) + "\n"


def _attributes(contract: type) -> Iterator[str]:
    for name, annotation in inspect.get_annotations(contract).items():
        if name.startswith("_"):
            continue
        kind = str(annotation).removeprefix("ClassVar[").removesuffix("]")
        default = f" = {_shown(vars(contract)[name])}" if name in vars(contract) else "    # needed"
        yield f"    {name}: {kind}{default}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_shown(item) for item in value)}{',' if len(value) == 1 else ''})"
    return value.__name__ if isinstance(value, type) else repr(value)


def _methods(contract: type) -> Iterator[str]:
    for name, own in vars(contract).items():
        member = own.__func__ if isinstance(own, staticmethod) else own
        if name.startswith("_") or not inspect.isfunction(member):
            continue
        needed = "    # needed" if getattr(member, "__isabstractmethod__", False) else ""
        if isinstance(own, staticmethod):
            yield "    @staticmethod"
        yield f"    def {name}{inspect.signature(member)}{needed}".replace("'", "")


def with_contract(text: str, contract: type) -> str:
    """A page with the contract as it is."""
    return _CONTRACT.sub(lambda found: found[1] + contract_text(contract) + found[2], text)


def main() -> None:
    """Write the contracts into the pages."""
    for name, kind in PAGES.items():
        page(name).write_text(with_contract(page(name).read_text(), kind.contract))


if __name__ == "__main__":
    main()
