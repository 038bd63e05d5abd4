"""The machine document: constants of a machine, what they were fitted to, and what was not measured.

It is JSON, checked on load. Constants are milliseconds a unit of the amounts in ``work.py`` and ``step.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attrs import field, frozen

from shardwright.errors import InvalidInputError, nearest
from shardwright.planning.documents import MACHINE
from shardwright_plugins.estimators.engine.step import ENGINE
from shardwright_plugins.estimators.engine.work import LOOKUP, UPDATE

ESTIMATOR = "engine"
_CONSTANTS = ("cache_bytes", "kernels", "engine", "fixed")
KERNEL = (*LOOKUP, *UPDATE)
FIXED = ("step",)
"""Milliseconds of a step whatever it does."""
_SHIPPED = Path(__file__).parent / "machines"
_DEFAULT = "amd_epyc_zen4_2_ranks"


def _amounts(names: Sequence[str]) -> Any:
    def check(instance: Any, attribute: Any, value: Mapping[str, float]) -> None:
        _check_constants(attribute.name, value, names)

    return check


def _check_constants(where: str, value: Any, names: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"the machine document's {where} must be an object, got {value!r}")
    for name, number in value.items():
        if name not in names:
            raise InvalidInputError(
                f"the machine document's {where} has {name!r}. Known: {', '.join(names)}.{nearest(str(name), names)}"
            )
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise InvalidInputError(
                f"the machine document's {where}.{name} must be a finite number of 0 or more, got {number!r}"
            )
    if missing := [name for name in names if name not in value]:
        raise InvalidInputError(f"the machine document's {where} lacks {', '.join(missing)}")


@frozen
class Machine:
    """Constants of a machine.

    Args:
        made: provenance: processor, versions, ranks, date.
        cache_bytes: bytes of a rank's near cache that fitted best.
        kernels: compute kernel -> its constants, :data:`KERNEL`, ms a unit.
        engine: constants of the engine, ms a unit.
        fixed: milliseconds of a step whatever it does, :data:`FIXED`.
        topology: arguments of ``Topology`` that were measured, by name.
        fits: number of experiments of each fit, the median and the worst error, by name.
        unmeasured: reason why something was not measured, by its name.
    """

    made: Mapping[str, Any]
    cache_bytes: float = field()
    kernels: Mapping[str, Mapping[str, float]] = field()
    engine: Mapping[str, float] = field(validator=_amounts(ENGINE))
    fixed: Mapping[str, float] = field(validator=_amounts(FIXED))
    topology: Mapping[str, float] = field(factory=dict)
    fits: Mapping[str, Any] = field(factory=dict)
    unmeasured: Mapping[str, str] = field(factory=dict)

    @property
    def first(self) -> str:
        """The kernel that the steps were measured with, the preferred one of the machine."""
        return next(iter(self.kernels))

    @cache_bytes.validator
    def _positive(self, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InvalidInputError(f"the machine document's cache_bytes must be above 0, got {value!r}")

    @kernels.validator
    def _known(self, attribute: Any, value: Any) -> None:
        if not isinstance(value, Mapping) or not value:
            raise InvalidInputError("the machine document has no kernels: measure at least one")
        for name, constants in value.items():
            _check_constants(f"kernels.{name}", constants, KERNEL)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The machine in a document.

        Raises:
            InvalidInputError: it has another form, or constants of another estimator; the text says where.
        """
        data = MACHINE.parse(text)
        MACHINE.check(data)
        if data["estimator"] != ESTIMATOR:
            raise InvalidInputError(
                f"the machine document has constants of the estimator {data['estimator']!r}, not of {ESTIMATOR!r}"
            )
        constants = data["constants"]
        if unlike := set(constants) ^ set(_CONSTANTS):
            raise InvalidInputError(
                f"the machine document's constants must be {', '.join(_CONSTANTS)}; {', '.join(sorted(unlike))} is "
                "missing or unknown"
            )
        rest = {name: data.get(name, {}) for name in ("made", "topology", "fits", "unmeasured")}
        return cls(**{name: constants[name] for name in _CONSTANTS}, **rest)

    @classmethod
    def read(cls, path: Path) -> Machine:
        """The machine in a file.

        Raises:
            InvalidInputError: it cannot be read, or has another form.
        """
        return cls.from_json(MACHINE.text(path))

    def to_json(self) -> str:
        """The document: keys in a fixed order and a value a line, so that two of them can be compared."""
        data = {
            "format": "shardwright-machine",
            "version": 1,
            "estimator": ESTIMATOR,
            "made": self.made,
            "topology": self.topology,
            "constants": {name: getattr(self, name) for name in _CONSTANTS},
            "fits": self.fits,
            "unmeasured": self.unmeasured,
        }
        return json.dumps(data, indent=1) + "\n"


@cache
def shipped_machine(name: str = _DEFAULT) -> Machine:
    """A machine that was measured beforehand and comes with the package.

    Raises:
        InvalidInputError: there is none of that name.
    """
    path = _SHIPPED / f"{name}.json"
    if not path.exists():
        known = sorted(found.stem for found in _SHIPPED.glob("*.json"))
        raise InvalidInputError(
            f"no machine {name!r} is shipped. Known: {', '.join(known)}.{nearest(name, known)}"
        )
    return Machine.read(path)
