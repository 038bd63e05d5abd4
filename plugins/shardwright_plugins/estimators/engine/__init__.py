"""engine: what a step of this engine takes, phase by phase, with constants that were measured on a machine.

Amounts of work (``work.py``, ``step.py``) are multiplied by constants of a machine document (``machine.py``), which
``shardwright calibrate`` fits. Phases: ids to the ranks that own rows, lookups, results home, gradients back, updates,
and what keeps copies equal. Each phase ends in an exchange, so that a step takes as long as the slowest rank of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from attrs import evolve

from shardwright.contracts.estimator import PERFORMANCE, Estimator
from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.assumptions import CPU_DEVICE
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.objectives import largest_rank_time
from shardwright.planning.search.placement import Placed
from shardwright.planning.search.refinements import Outcome, Refinement, Search
from shardwright.planning.text import count_text
from shardwright.planning.watch import Watch
from shardwright_plugins.estimators.engine.kernels import KernelPrices
from shardwright_plugins.estimators.engine.machine import (
    FIRST,
    UNSTEADY,
    Machine,
    nearest_machine,
    shipped_machine,
    shipped_names,
)
from shardwright_plugins.estimators.engine.mixing import Mixing
from shardwright_plugins.estimators.engine.step import OF_ENGINE, StepWork, until_all_have_computed
from shardwright_plugins.estimators.engine.unmixed import unmixed_plans
from shardwright_plugins.estimators.engine.work import LOOKUP, OF_KERNELS, UPDATE
from shardwright_plugins.estimators.roofline import Roofline
from shardwright_plugins.measuring.processor import processor

__all__ = ["Engine"]

_PHASES: Mapping[str, tuple[str, ...]] = {
    phase: (*OF_KERNELS.get(phase, ()), *names) for phase, names in OF_ENGINE.items() if phase != "mixing"
}
_COMPUTE = frozenset(OF_KERNELS)
MIXED = 16.0
"""A table of another kind is told to cost what is right where it alone is one, of 16 tables as wide."""
EXCHANGED = 0.6
"""Exchanges of whole tables beside their lookups and updates: 0.5 to 1 in measured plans of drawn workloads."""


class Engine(Estimator):
    """A training step of this engine on a measured machine; elsewhere than on CPUs, and for serving, as ``roofline``.

    Between hosts, what travels takes the time of ``roofline`` beside, by the topology's links. A kernel that the
    machine's document does not have takes the time that it tells (``ComputeKernel.times_ms``). If it tells none, it is
    taken for the first that the document has, at the bandwidth that it declares, and the plan lists that as assumed.

    Of several machines that are shipped, each has an estimator, and the one whose processor is nearest to this one's
    may be taken unasked. Its name stands in plans, which so cost the same wherever they are checked.

    Args:
        machine: path of a machine document that ``shardwright calibrate`` wrote; the shipped one by default.
    """

    name: ClassVar[str] = "engine"
    measures: ClassVar[str] = PERFORMANCE
    depends_on_shape_only: ClassVar[bool] = True
    preference: ClassVar[int] = 30
    shipped: ClassVar[str] = FIRST

    def __init__(self, machine: str = "") -> None:
        self._file = machine
        self._last: tuple[Options, Topology, Mapping[str, Floats], Mixing] | None = None

    @classmethod
    def of(cls, machine: Machine) -> Engine:
        """The estimator with a machine's constants."""
        made = cls()
        made.machine = machine
        return made

    @cached_property
    def machine(self) -> Machine:
        """The machine's constants."""
        return Machine.read(Path(self._file)) if self._file else shipped_machine(self.shipped)

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Milliseconds of each phase, ``[S]``, as a search is to weigh them.

        Each rank routes its own batch and puts its own outputs in order, whoever owns the rows. A search that had all
        of that on the owner would give a rank with many exchanges fewer lookups, and the step would wait for the other.
        So what the exchanges of whole tables take is told as :data:`EXCHANGED` of lookups and updates, at the speed of
        the ranks, so that those of unlike speed look up and update for as long. On tables of other kinds stands what
        they take beyond that, and that the plan becomes mixed.
        """
        if not _is_measured(options, topology):
            return Roofline().estimate(options, topology)
        phases = self._phases(options, topology, self._beyond_whole)
        computed: Floats = sum((phases[phase] for phase in _COMPUTE), np.zeros(options.num_shards))
        phases["exchanges"] = EXCHANGED * computed + self._regrouped(options, topology)
        if topology.num_hosts > 1:
            travelling = Roofline().estimate(options, topology)
            phases |= {
                phase: phases[phase] + own for phase, own in travelling.items() if phase not in _COMPUTE
            }
        return phases

    def _phases(
        self, options: Options, topology: Topology, constants: Callable[[Floats], Mapping[str, Any]]
    ) -> dict[str, Floats]:
        """Amounts times the engine's constants by the efforts of runs, and those of kernels, ms of each phase: ``[S]``.

        On ranks of a speed lookups and updates take their times over that speed.
        """
        work = StepWork(options, topology, self.machine.cache_bytes)
        kernels = KernelPrices(options, self.machine)
        amounts = amounts_of(work)
        of_names: Mapping[str, Any] = {**constants(kernels.effort(work)), **kernels.constants}
        told = kernels.told_ms(work, topology)
        updates = told["backward_compute"]
        beside = {"id_partition": work.map_ms, **told, "backward_compute": updates * ~work.is_copy}
        none = np.zeros(options.num_shards)
        phases = {
            phase: sum((amounts[name] * of_names[name] for name in names), beside.get(phase, none))
            for phase, names in _PHASES.items()
        }
        phases["backward_compute"] = np.maximum(phases["backward_compute"], kernels.copied_ms(work, updates))
        return phases | {phase: phases[phase] / topology.speed for phase in _PHASES if phase in _COMPUTE}

    def _regrouped(self, options: Options, topology: Topology) -> Floats:
        """Cost of a kernel other than the first that a shipped document has, ms: ``[S]``.

        What is the quickest kernel on another processor is not known, so that plans by its document have the first. By
        a document of its own machine, a search takes the kernel that costs a table least.
        """
        if self._file:
            return np.zeros(options.num_shards)
        work = StepWork(options, topology, self.machine.cache_bytes)
        elements = topology.world_size * work.own_vectors * options.num_columns * ~work.is_copy
        an_element = MIXED * (self.machine.engine["mixed_sent"] + self.machine.engine["mixed_gradient"])
        is_other = np.array(
            [kernel.name != self.machine.first for kernel in options.compute_kernels], dtype=bool
        )
        regrouped: Floats = an_element * elements * is_other[options.compute_kernel][options.option]
        return regrouped

    def _all(self, effort: Floats) -> Mapping[str, Floats]:
        """The engine's constants times the efforts of runs: ``[S]`` each."""
        return {name: ms * effort for name, ms in self.machine.engine.items()}

    def _beyond_whole(self, effort: Floats) -> Mapping[str, Any]:
        """The engine's constants, those of exchanges less what the same amounts of whole tables take."""
        whole, ms = self.machine.engine, self._all(effort)
        nothing = {name: 0.0 for name in ms if name.startswith("whole_")}
        cut = {
            name: np.maximum(ms[name] - whole.get(name.replace("cut_", "whole_"), 0.0), 0.0)
            for name in ms
            if name.startswith("cut_")
        }
        mixed = MIXED * (whole["mixed_result"] + whole["mixed_gradient"])
        return {
            **ms,
            **nothing,
            **cut,
            "cut_sent": cut["cut_sent"] + MIXED * whole["mixed_sent"],
            "cut_result": cut["cut_result"] + mixed,
            "copy_result": np.maximum(ms["copy_result"] - whole["whole_result"], 0.0) + mixed,
        }

    def serves(self, topology: Topology) -> bool:
        """True for several ranks on CPUs, where its plans were measured, if no other shipped machine is nearer."""
        if topology.world_size == 1 or not _on_cpus(topology):
            return False
        return bool(self._file) or nearest_machine(processor()) == self.shipped

    def step_phases(
        self, phases: Mapping[str, Floats], options: Options, chosen: Ints, topology: Topology
    ) -> Mapping[str, Floats]:
        """Lookups and updates of each rank, the mean of exchanges over ranks, waits, and what any step takes.

        Exchanges are those of the plan's options; that they are mixed is counted once. Ranks wait for the slowest
        lookups and for the slowest updates. Ranks that share cores wait for the cores.
        """
        if not _is_measured(options, topology):
            return super().step_phases(phases, options, chosen, topology)
        computed = {phase: phases[phase] for phase in _PHASES if phase in _COMPUTE}
        exchanges, mixed = self._of_options(options, topology)
        everywhere = np.ones(topology.world_size)
        exchanged = {phase: everywhere * own[chosen].sum() for phase, own in exchanges.items()}
        share, neighbours = self.machine.cores_a_rank, topology.local_world_size
        ends = {phase: until_all_have_computed(own, share, neighbours) for phase, own in computed.items()}
        # Where others have less to do, a rank has more of the cores.
        computed = {phase: np.minimum(own, ends[phase]) for phase, own in computed.items()}
        waiting = np.sum([ends[phase] - own for phase, own in computed.items()], axis=0)
        kernels = {options.compute_kernels[code].name for code in options.compute_kernel[chosen].tolist()}
        return {
            **computed,
            **exchanged,
            "mixing": everywhere * mixed.of_plan(chosen),
            "waiting": waiting,
            "fixed": everywhere * self.machine.step_ms(kernels),
        }

    def refinements(self, topology: Topology) -> Sequence[Refinement]:
        """The comparison of a plan with plans of whole tables of one kernel."""
        return (self._compared,) if _on_cpus(topology) else ()

    def _compared(self, search: Search, request: Request, watch: Watch) -> Outcome:
        """Search; take a plan of whole tables of one kernel if its step is shorter.

        A search adds costs of tables. It does not see that a plan is mixed, nor what the calls of a kernel add to a
        step. The latter counts by the machine's own document; by a shipped one the first kernel is preferred.
        """
        found = search(request, watch)
        plan = found.result.plan
        if plan is None or not self._sees_less(plan):
            return found
        # What a search is told of other kernels and of exchanges would leave ranks with uneven lookups and updates.
        computed = evolve(found.space, phases={phase: found.space.phases[phase] for phase in _COMPUTE})
        plans = [Placed(plan.proposal, plan.ranks), *unmixed_plans(computed)]
        steps = [self._step_ms(found.space, one) for one in plans]
        best = int(np.argmin(steps))
        note = (
            f"{self.name}: a step takes {steps[best]:.4g} ms by this plan, whose whole tables have one kernel, and "
            f"{steps[0]:.4g} ms by the one that was found, with costs that no table has alone"
        )
        return evolve(found.with_plan(plans[best]), notes=(*found.notes, note)) if best else found

    def _sees_less(self, plan: LoadedPlan) -> bool:
        """True if the step has costs that no table has alone, and that another plan may be without."""
        options = plan.space.options
        has_others = bool(self._file) and len(set(options.compute_kernel.tolist())) > 1
        is_mixed = Mixing(options, self.machine.engine).of_plan(plan.proposal) > 0
        return (is_mixed or has_others) and _is_measured(options, plan.space.topology)

    def _step_ms(self, space: SearchSpace, plan: Placed) -> float:
        """Time of a step, ms."""
        loads = LoadedPlan(space, plan.proposal, plan.ranks).phases_ms
        return largest_rank_time(self.step_phases(loads, space.options, plan.proposal, space.topology))

    def _of_options(self, options: Options, topology: Topology) -> tuple[Mapping[str, Floats], Mixing]:
        """Means over ranks of what exchanges of each option take, ms, by phase, ``[O]``; and a mixed plan's part.

        Kept for the last options: many plans of them are compared.
        """
        known = self._last
        if known is None or known[0] is not options or known[1] is not topology:
            shards = self._phases(options, topology, self._all)
            if topology.num_hosts > 1:
                for phase, own in Roofline().estimate(options, topology).items():
                    shards[phase] = shards.get(phase, 0.0) + own
            means = {
                phase: np.add.reduceat(own * options.count, options.first_shard[:-1]) / topology.world_size
                for phase, own in shards.items()
                if phase not in _COMPUTE
            }
            known = self._last = options, topology, means, Mixing(options, self.machine.engine)
        return known[2:]

    def provenance(self, options: Options) -> Mapping[str, Any]:
        """Origin of the constants where no machine was given, and kernels that are taken for another one."""
        # Elsewhere than on CPUs, and for serving, kernels have the prices of ``roofline``.
        is_measured = {request.device for _, request in options.requests} == {CPU_DEVICE}
        is_measured &= not options.is_frozen.all()
        assumed = KernelPrices(options, self.machine).assumed if is_measured else {}
        return {**self._origin(), **({"kernels": dict(assumed)} if assumed else {})}

    def _origin(self) -> Mapping[str, str]:
        """Origin of the constants, if the machine was not given, on another processor, and what is doubtful of them."""
        made, here, drift = self.machine.made, processor(), self.machine.drift
        unsteady = f"its speed changed by {drift:.0%} while it was measured" if drift > UNSTEADY else ""
        if self._file:
            return {"machine": unsteady} if unsteady else {}
        origin = f"{made['processor']}, {count_text(made['ranks'], 'rank')}, {made['date']}"
        other = "" if made["processor"] == here else f"; this plan is made on another processor, {here}"
        return {"machine": f"{origin}{other}{unsteady and '; ' + unsteady}"}


def engines() -> list[type[Engine]]:
    """The estimators of all shipped machines."""
    others = [name for name in shipped_names() if name != FIRST]
    return [Engine, *(type(name, (Engine,), {"name": f"engine_{name}", "shipped": name}) for name in others)]


def _on_cpus(topology: Topology) -> bool:
    return topology.device_types == (CPU_DEVICE,)


def _is_measured(options: Options, topology: Topology) -> bool:
    """True for steps that the constants are of: on CPUs, with tables that are trained."""
    return _on_cpus(topology) and not bool(options.is_frozen.all())


def amounts_of(work: StepWork) -> dict[str, Floats]:
    """All amounts of a step: the engine's, and those of kernels."""
    lookups, updates = work.lookups().amounts(), work.update_amounts()
    return {
        **work.amounts(),
        **{name: lookups[name] for name in LOOKUP},
        # What an update of copies takes is the engine's: it joins all ranks' batches first.
        **{name: updates[name] * (work.is_trained & ~work.is_copy) for name in UPDATE},
    }
