"""Tables and constraints that a plan document states as its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import frozen

from shardwright.errors import InvalidInputError, PlanError, ShardwrightError
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.tables.workload import table_from_data


@frozen(eq=False)
class InputTables:
    """The tables that a planner was given, and what was asked of them.

    Args:
        tables: path of the module and name -> the table; none where the document does not say.
        constraints: constraints of all tables.
    """

    tables: Mapping[tuple[str, str], TableSpec]
    constraints: Constraints

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> InputTables:
        """Read the tables and constraints from a document's ``inputs``.

        Raises:
            PlanError: it is not as a planner writes it, or has a table twice.
        """
        inputs = document.get("inputs", {})
        try:
            with reading_inputs():
                entries = inputs.get("tables", {}).get("value", ())
                specs = [table_from_data(entry, f"table {index}") for index, entry in enumerate(entries)]
                constraints = Constraints.from_data(inputs.get("constraints", {}).get("value", {}))
        except InvalidInputError as error:
            raise PlanError(f"the plan document's inputs: {error}") from error
        tables = {(spec.module, spec.name): spec for spec in specs}
        if len(tables) < len(specs):
            raise PlanError(
                f"the plan document's inputs.tables has {len(specs)} tables with {len(tables)} different names; each "
                "needs its own name in its module"
            )
        return cls(tables, constraints)


@contextmanager
def reading_inputs() -> Iterator[None]:
    """Within this, what has not the form that the planner gave it is an error of the document.

    Raises:
        PlanError: instead of what went wrong; errors of ours are left as they are.
    """
    try:
        yield
    except ShardwrightError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise PlanError(
            f"the plan document's inputs are not as a planner writes them ({type(error).__name__}: {error}): undo "
            "what was edited in them, or plan again"
        ) from error
