"""The machine document: constants of a machine, what they were fitted to, and what was not measured.

It is JSON, checked on load. Constants are milliseconds a unit of the amounts in ``work.py`` and ``step.py``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
EFFORTS = ("cut", "copied")
"""Times of the engine's constants for tables of a kernel whose rows are cut, or copied; 1 where not measured."""
STEP = "step"
"""Milliseconds that a kernel's calls add to any step in which it has a table; 0 where not measured."""
BASE = "FP32"
"""Data type of rows that every kernel is measured with."""
FIXED = ("step",)
"""Milliseconds of a step whatever it does."""
UNSTEADY = 0.1
"""Drift of a machine that its document is noted for: repeated measurements of the reference are 1 to 5 % apart."""
SHIPPED = Path(__file__).parent / "machines"
"""Folder of the machines that come with the package."""
FIRST = "amd_epyc_zen5_2_ranks"
"""The shipped machine whose estimator is ``engine``; those of others have the machine's name behind that."""


def _amounts(names: Sequence[str]) -> Any:
    def check(instance: Any, attribute: Any, value: Mapping[str, float]) -> None:
        _check_constants(attribute.name, value, names)

    return check


def _check_constants(where: str, value: Any, names: Sequence[str], optional: Sequence[str] = ()) -> None:
    if not isinstance(value, Mapping):
        raise InvalidInputError(f"the machine document's {where} must be an object, got {value!r}")
    for name, number in value.items():
        if name not in (known := (*names, *optional)):
            raise InvalidInputError(
                f"the machine document's {where} has {name!r}. Known: {', '.join(known)}.{nearest(str(name), known)}"
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
        kernels: compute kernel, and data type of rows if that is not :data:`BASE` -> its constants, :data:`KERNEL`, ms
            a unit, :data:`EFFORTS` and :data:`STEP`; see :func:`kernel_key`.
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
    topology: Mapping[str, Any] = field(factory=dict)
    fits: Mapping[str, Any] = field(factory=dict)
    unmeasured: Mapping[str, str] = field(factory=dict)

    @property
    def first(self) -> str:
        """The kernel that the steps were measured with, the preferred one of the machine."""
        return next(iter(self.kernels))

    def step_ms(self, kernels: Iterable[str]) -> float:
        """Milliseconds of a step whatever it does.

        Args:
            kernels: names of the kernels that have a table.
        """
        return self.fixed["step"] + sum(self.kernels.get(name, {}).get(STEP, 0.0) for name in kernels)

    @property
    def cores_a_rank(self) -> float:
        """Cores that a rank had while all worked, 1 at most."""
        ranks_a_host = self.made.get("ranks", 1) / self.made.get("hosts", 1)
        return cores_a_rank(self.made.get("cores", ranks_a_host), ranks_a_host)

    @property
    def reference_ms(self) -> float | None:
        """Time of a fixed work when steps were measured, ms (``measuring/timing.py``); ``None`` if not known."""
        _, *of_steps = self.made.get("reference_ms") or [None]
        return sum(of_steps) / len(of_steps) if of_steps else None

    @property
    def drift(self) -> float:
        """The part by which the machine grew slower while it was measured, or quicker; 0 where that is not known."""
        told = self.made.get("reference_ms") or [1.0]
        return max(told) / min(told) - 1

    @cache_bytes.validator
    def _positive(self, attribute: Any, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InvalidInputError(f"the machine document's cache_bytes must be above 0, got {value!r}")

    @kernels.validator
    def _known(self, attribute: Any, value: Any) -> None:
        if not isinstance(value, Mapping) or not value:
            raise InvalidInputError("the machine document has no kernels: measure at least one")
        for name, constants in value.items():
            _check_constants(f"kernels.{name}", constants, KERNEL, (*EFFORTS, STEP))

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
        if set(constants) != set(_CONSTANTS):
            raise InvalidInputError(
                f"the machine document's constants are {', '.join(sorted(constants)) or 'none'}; {ESTIMATOR!r} takes "
                f"{', '.join(_CONSTANTS)}, which `shardwright calibrate` measures. Without them name another estimator"
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


def cores_a_rank(cores: float, ranks_a_host: float) -> float:
    """Cores that each rank of a host has while all work, 1 at most."""
    return min(cores / ranks_a_host, 1.0)


def kernel_key(name: str, data_type: str) -> str:
    """Key of a kernel's constants for rows of a data type: ``fused``, ``fused FP16``."""
    return name if data_type == BASE else f"{name} {data_type}"


def shipped_names() -> list[str]:
    """Names of the machines that were measured beforehand and come with the package, the first one first."""
    return sorted((path.stem for path in SHIPPED.glob("*.json")), key=lambda name: (name != FIRST, name))


def shipped_machine(name: str = FIRST) -> Machine:
    """A machine that comes with the package.

    Args:
        name: one of :func:`shipped_names`.
    """
    return _read_once(SHIPPED / f"{name}.json")


def nearest_machine(processor: str) -> str:
    """Name of the shipped machine whose processor's name shares most words with a processor's.

    Args:
        processor: name, as :func:`~shardwright_plugins.measuring.processor.processor` has it.
    """
    here, names = _words(processor), shipped_names()

    def alike(name: str) -> float:
        there = _words(shipped_machine(name).made["processor"])
        return len(here & there) / max(len(here | there), 1)

    return max(names, key=alike)  # the first of equals


def _words(text: str) -> set[str]:
    """Words of a processor's name, and its number of three digits or more: small ones are of cores, models or GHz."""
    return {*re.findall("[a-z]{2,}|[0-9]{3,}", text.lower())} - {"family", "model"}


_read_once = cache(Machine.read)
