"""Prices of kernels: measured constants, else the time that a kernel tells, else those of another at its bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.arguments import brief
from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest, KernelWork
from shardwright.errors import PlanningError
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.plugin_calls import calling
from shardwright_plugins.estimators.engine.machine import EFFORTS, KERNEL, Machine, kernel_key
from shardwright_plugins.estimators.engine.step import StepWork
from shardwright_plugins.estimators.engine.work import OF_KERNELS, UPDATE

_NO = np.zeros(0)
_NO_BLOCKS = KernelWork(_NO, _NO, _NO, _NO, bytes_per_ms=1.0)


@frozen(eq=False, slots=False)
class KernelPrices:
    """Prices of the kernels of some options, as columns over runs.

    Args:
        options: options.
        machine: constants of the kernels that were measured.
    """

    options: Options
    machine: Machine

    @cached_property
    def constants(self) -> Mapping[str, Floats]:
        """Milliseconds a unit of each amount: ``[S]``; 0 for kernels that tell their time."""
        return {name: self._column(name, 0.0) for name in KERNEL}

    def effort(self, work: StepWork) -> Floats:
        """Time of the engine's work for each run beside that for the machine's first kernel: ``[S]``.

        Kernels read ids, and gradients, in orders of their own, which the engine has to bring them into.
        """
        cut, copied = (self._column(name, 1.0) for name in EFFORTS)
        return np.where(work.is_copy, copied, np.where(work.is_cut, cut, 1.0))

    def _column(self, name: str, otherwise: float) -> Floats:
        kernels = self.options.compute_kernels
        own = [
            self._of(kernels[code], request).get(name, otherwise) for code, request in self.options.requests
        ]
        return np.array(own)[self.options.request]

    def _of(self, kernel: ComputeKernel, request: KernelRequest) -> Mapping[str, float]:
        measured = self._measured(kernel, request)
        if measured is not None:
            return measured
        if _tells(kernel, request):
            return {}
        slower = 1 / kernel.bandwidth_fraction(request)
        return {name: value * slower for name, value in self.machine.kernels[self.machine.first].items()}

    def _measured(self, kernel: ComputeKernel, request: KernelRequest) -> Mapping[str, float] | None:
        """Constants that were measured for rows of this data type, or else for float32 rows; ``None``: for neither."""
        known = self.machine.kernels
        return known.get(kernel_key(kernel.name, str(request.data_type))) or known.get(kernel.name)

    def told_ms(self, work: StepWork, topology: Topology) -> Mapping[str, Floats]:
        """Phase -> time that kernels tell which were not measured, ms: ``[S]``; 0 for others."""
        options, lookups = self.options, work.lookups()
        columns = np.stack([lookups.ids, lookups.distinct, lookups.vectors, lookups.rows])
        told = np.zeros((len(OF_KERNELS), options.num_shards))
        for code, (kernel_code, request) in enumerate(options.requests):
            kernel, runs = options.compute_kernels[kernel_code], options.request == code
            if self._measured(kernel, request) is None and _tells(kernel, request):
                reached = topology.read_bandwidth("device", request.device)
                # The estimator takes the speed of ranks into account, for all kernels alike.
                bandwidth = self.machine.topology.get("ddr_mem_bw", reached / topology.speed)
                own = columns[:, runs]
                own.flags.writeable = False
                ids, distinct, vectors, rows = own
                told[:, runs] = _times_ms(
                    kernel, request, KernelWork(ids, distinct, vectors, rows, bandwidth)
                )
        lookup_ms, update_ms = told
        return {"forward_compute": lookup_ms, "backward_compute": update_ms * work.is_trained}

    def copied_ms(self, work: StepWork, told_ms: Floats) -> Floats:
        """Least time of updates of copies, ms: ``[S]``; 0 for the machine's first kernel, and for what is no copy.

        They join all ranks' batches first, which the engine's constants have in them. Those were measured with the
        first kernel: by another one they take what its updates of a whole table of as many ids do, if that is longer.

        Args:
            work: the work of a step.
            told_ms: updates as kernels tell them for the ids of one rank's batch, of :meth:`told_ms`.
        """
        kernels, updates = self.options.compute_kernels, work.update_amounts()
        is_other = np.array([kernel.name != self.machine.first for kernel in kernels], dtype=bool)
        told_ms = told_ms * work.topology.world_size * work.sent_share
        own_ms: Floats = told_ms + sum(updates[name] * self.constants[name] for name in UPDATE)
        return own_ms * (
            work.is_copy & work.is_trained & is_other[self.options.compute_kernel][self.options.option]
        )

    @property
    def assumed(self) -> Mapping[str, str]:
        """Name of a kernel that was not measured and tells no time -> what it is taken for."""
        asked = [(self.options.compute_kernels[code], request) for code, request in self.options.requests]
        return {
            kernel.name: f"{self.machine.first}, at the part of its bandwidth that it declares"
            for kernel, request in asked
            if self._measured(kernel, request) is None and not _tells(kernel, request)
        }


def _tells(kernel: ComputeKernel, request: KernelRequest) -> bool:
    """True if a kernel tells its time."""
    with calling(f"compute kernel {kernel.name!r}"):
        return kernel.times_ms(request, _NO_BLOCKS) is not None


def _times_ms(kernel: ComputeKernel, request: KernelRequest, work: KernelWork) -> tuple[Floats, Floats]:
    """Ask a kernel for its times: of lookups and of updates, ms, ``[N]`` each.

    Raises:
        PlanningError: it raised, or told anything else.
    """
    who = f"compute kernel {kernel.name!r}"
    with calling(who):
        told = kernel.times_ms(request, work)
    if isinstance(told, tuple) and len(told) == 2 and all(_are_times(own, len(work.ids)) for own in told):
        return told
    raise PlanningError(
        f"{who} broke its contract: times_ms() must return a pair, milliseconds of lookups and of updates, each an "
        f"array of {len(work.ids)} finite numbers of 0 or more, one a block; it returned {brief(told)}"
    )


def _are_times(told: object, count: int) -> bool:
    """True for an array of so many finite numbers of 0 or more."""
    if not isinstance(told, np.ndarray) or told.shape != (count,) or told.dtype.kind not in "iuf":
        return False
    return bool((np.isfinite(told) & (told >= 0)).all())
