"""Files that commands about plans read and write; none needs torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import InvalidInputError, PlanError

if TYPE_CHECKING:
    from shardwright.planning.plan.plan import ShardingPlan


def read_plan(path: Path) -> ShardingPlan:
    """Read a plan document.

    Raises:
        PlanError: it is malformed; the text names the file.
    """
    from shardwright.planning.documents import PLAN
    from shardwright.planning.plan.plan import ShardingPlan

    text = PLAN.text(path)
    try:
        return ShardingPlan.from_json(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def check_writable(path: Path | None) -> None:
    """Check that a file can be written before work begins whose result it is to hold.

    Raises:
        InvalidInputError: it is a folder, or its folder does not exist or may not be written to.
    """
    if path is None:
        return
    folder = path.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {str(folder)!r}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "that is not permitted"
    else:
        return
    raise InvalidInputError(f"cannot write {str(path)!r}: {reason}. Name a file that can be written.")


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        InvalidInputError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write {str(path)!r}: {error.strerror}") from error
