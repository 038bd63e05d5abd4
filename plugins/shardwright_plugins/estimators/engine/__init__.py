"""engine: what a step of this engine takes, phase by phase, with constants that were measured on a machine.

Amounts of work (``work.py``, ``step.py``) are multiplied by constants of a machine document (``machine.py``), which
``shardwright calibrate`` fits. Phases: ids to the ranks that own rows, lookups, results home, gradients back, updates,
and what keeps copies equal. Each phase ends in an exchange, so that a step takes as long as the slowest rank of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.estimator import PERFORMANCE, Estimator
from shardwright.planning.arrays import Floats
from shardwright.planning.assumptions import CPU_DEVICE
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright_plugins.estimators.engine.machine import Machine, shipped_machine
from shardwright_plugins.estimators.engine.step import COPIED, COPIES, GRADIENTS, INPUT, RESULTS, StepWork
from shardwright_plugins.estimators.engine.work import LOOKUP, UPDATE
from shardwright_plugins.estimators.roofline import Roofline

__all__ = ["Engine"]

_PHASES: Mapping[str, tuple[str, ...]] = {
    "input_communication": INPUT,
    "forward_compute": LOOKUP,
    "forward_communication": RESULTS,
    "backward_communication": (*GRADIENTS, *COPIES),
    "backward_compute": (*UPDATE, *COPIED),
}
_EXCHANGES = frozenset(phase for phase in _PHASES if phase.endswith("communication"))


class Engine(Estimator):
    """A step of this engine on a measured machine; elsewhere than on CPUs the model of ``roofline``.

    Between hosts, what travels takes the time of ``roofline`` beside, by the topology's links. A kernel that the
    machine's document does not have is taken for the first that it has, at the bandwidth that it declares.

    Args:
        machine: path of a machine document that ``shardwright calibrate`` wrote; a shipped one by default.
    """

    name: ClassVar[str] = "engine"
    measures: ClassVar[str] = PERFORMANCE
    depends_on_shape_only: ClassVar[bool] = True

    def __init__(self, machine: str = "") -> None:
        self._file = machine

    @cached_property
    def machine(self) -> Machine:
        """The machine's constants."""
        return Machine.read(Path(self._file)) if self._file else shipped_machine()

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Milliseconds of each phase, ``[S]``."""
        if not self.serves(topology):
            return Roofline().estimate(options, topology)
        work = StepWork(options, topology, self.machine.cache_bytes)
        amounts = amounts_of(work)
        constants = self._constants(options)
        phases = {
            phase: sum((amounts[name] * constants[name] for name in names), np.zeros(options.num_shards))
            for phase, names in _PHASES.items()
        }
        if topology.num_hosts > 1:
            travelling = Roofline().estimate(options, topology)
            phases.update({phase: phases[phase] + travelling[phase] for phase in _EXCHANGES})
        return phases

    def serves(self, topology: Topology) -> bool:
        """True where all ranks are on CPUs."""
        return topology.device_types == (CPU_DEVICE,)

    def step_ms(self, phases: Mapping[str, Floats], topology: Topology) -> float:
        """Lookups and updates of the slowest rank, exchanges of all alike, and what any step takes.

        What each rank does with its own batch stands on the owners of rows in the phases of exchange: at home it is the
        mean over ranks.
        """
        if not self.serves(topology):
            return super().step_ms(phases, topology)
        fixed = self.machine.fixed
        return float(
            sum(own.mean() if phase in _EXCHANGES else own.max() for phase, own in phases.items())
            + fixed["step"]
        )

    def _constants(self, options: Options) -> Mapping[str, Any]:
        """Milliseconds a unit: a number for the engine's, ``[S]`` for those of kernels."""
        kernels = options.compute_kernels
        own = [self._of_kernel(kernels[code], request) for code, request in options.requests]
        of_kernels = {
            name: np.array([one[name] for one in own])[options.request] for name in (*LOOKUP, *UPDATE)
        }
        return {**self.machine.engine, **of_kernels}

    def _of_kernel(self, kernel: ComputeKernel, request: KernelRequest) -> Mapping[str, float]:
        """Constants that were measured, or those of the first kernel at the bandwidth that this one declares."""
        known = self.machine.kernels
        if kernel.name in known:
            return known[kernel.name]
        slower = 1 / kernel.bandwidth_fraction(request)
        return {name: value * slower for name, value in next(iter(known.values())).items()}

    def provenance(self) -> Mapping[str, Any]:
        """Origin of the constants; nothing where a machine was given."""
        return {} if self._file else {"machine": dict(self.machine.made)}


def amounts_of(work: StepWork) -> dict[str, Floats]:
    """All amounts of a step: the engine's, and those of kernels."""
    lookups, updates = work.lookups().amounts(), work.updates().amounts()
    return {
        **work.amounts(),
        **{name: lookups[name] for name in LOOKUP},
        # What an update of copies takes is the engine's: it joins all ranks' batches first.
        **{name: updates[name] * (work.is_trained & ~work.is_copy) for name in UPDATE},
    }
