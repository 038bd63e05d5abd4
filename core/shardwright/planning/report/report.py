"""The report of a plan: what was tried, what each rank and table takes, how good it is, and what was assumed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import frozen

from shardwright.host.extensions import load_at
from shardwright.planning.options.inputs import assumed_inputs, under_assumed_values
from shardwright.planning.options.options import Refusal
from shardwright.planning.options.search_space import AVERAGING, SearchSpace
from shardwright.planning.plan.sharding import aligned, codecs_text, ranks_text
from shardwright.planning.proofs import RANKS, checked_by
from shardwright.planning.report.statistics import averaged_on_ranks, rank_data, table_data
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.objectives import OBJECTIVE_TEXTS
from shardwright.planning.search.placement import Proven
from shardwright.planning.search.search import SearchResult
from shardwright.planning.text import bytes_text, json_text, percent_at_most
from shardwright.planning.watch import gap_of

_MB = 1e6
_LEAST_GAP = 1e-6  # smaller ones are of arithmetic
_MORE = (
    "the search ended with its time or budget of work: more may narrow the gap (seconds=..., --seconds ...)"
)


@frozen(eq=False, slots=False)
class Report:
    """Report of a plan's costs, as text, as JSON data and in the formats that plugins offer.

    Args:
        space: options and costs.
        result: result of the search.
        inputs: inputs of the plan, with provenance.
        seconds: duration of planning, s.
        notes: sentences of the stages of the search.
    """

    space: SearchSpace
    result: SearchResult
    inputs: Mapping[str, Any]
    seconds: float
    notes: Sequence[str] = ()

    @cached_property
    def plan(self) -> LoadedPlan:
        """The plan with its loads."""
        assert self.result.plan is not None  # without a plan there is no report
        return self.result.plan

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        """Load of each rank; see :func:`~shardwright.planning.report.statistics.rank_data`."""
        return rank_data(self.plan)

    @cached_property
    def tables(self) -> list[dict[str, Any]]:
        """Cost of each table; see :func:`~shardwright.planning.report.statistics.table_data`."""
        return table_data(self.plan)

    @property
    def gap(self) -> float:
        """Largest excess over the bound, in parts of it; infinite where nothing is proven."""
        return gap_of(self.plan.value_ms, self.result.proven.bound_ms)

    @property
    def headline(self) -> str:
        """``fits; 1.69 ms; proven within 0.1 % under 9 assumed values (checked by arithmetic alone)``."""
        value = f"fits; {self.plan.value_ms:.4g} ms"
        if not math.isfinite(self.gap):
            return f"{value}; no bound proven"
        proof = f"within {percent_at_most(max(self.gap, _LEAST_GAP))}" if self.gap else "best"
        by = checked_by(self.result.proven.certificate)
        return f"{value}; proven {proof}{under_assumed_values(self.inputs)} ({by})"

    @property
    def summary(self) -> list[str]:
        """The headline, what was tried and how good it is, a sentence a line."""
        result = self.result
        tried = (
            f"proposals: {result.num_proposals} tried, {result.num_placed} fitted, "
            f"best by {result.proposer!r}, {self.seconds:.3f} s"
        )
        told = [
            self.headline,
            tried,
            self._value_text(),
            self._bound_text(),
            self._models_text(),
            *self._averaging_text(),
            *self.notes,
            *result.refused,
        ]
        return [*told, _MORE] if result.is_cut_short and self.gap > 0 else told

    def _value_text(self) -> str:
        """Name the objective and its value, and say what it is."""
        explained = OBJECTIVE_TEXTS.get(self.space.objective)
        text = f"{self.space.objective}: {self.plan.value_ms:.4g} ms"
        return f"{text}, {explained}" if explained else text

    def _models_text(self) -> str:
        """Name the cost models that were used, and the options offered to tables without constraints."""
        names = [self.inputs[name]["value"] for name in ("estimator", "storage_estimator")]
        offered = (
            "an option space of the caller's" if "option_space" in self.inputs else "all that is offered"
        )
        return f"time by {names[0]!r}, memory by {names[1]!r}, options: {offered}"

    def _averaging_text(self) -> Iterator[str]:
        """Yield the cost of averaging the replicas of other sharding groups, where there are any."""
        replicas = self.space.topology.replicas
        if replicas is None:
            return
        world_size = self.space.topology.world_size
        averaged = averaged_on_ranks(self.plan).max()
        # One part in R of the shards is added up on each rank: (R - 1) / R of the bytes leave it twice.
        sent = 2 * averaged * (replicas.num_groups - 1) / replicas.num_groups
        time_ms = self.plan.phases_ms[AVERAGING].max()
        often = "step" if replicas.sync_every == 1 else f"{replicas.sync_every} steps"
        yield (
            f"{replicas.num_groups} sharding groups of {world_size} ranks with such a plan, averaged every {often}: "
            f"the fullest rank averages {averaged / _MB:.4g} MB of weights and optimizer state and sends "
            f"{sent / _MB:.4g} MB each time; {time_ms:.4g} ms a step"
        )

    def _bound_text(self) -> str:
        bound, by = self.result.proven.bound_ms, checked_by(self.result.proven.certificate)
        if not math.isfinite(self.gap):
            return "no bound is proven: a better plan may exist"
        if self.gap == 0:
            return f"no plan is better under these costs (bound {bound:.4g} ms, {by})"
        within = f"this one is within {percent_at_most(self.gap)} of it"
        found = f"no plan is better than {bound:.4g} ms under these costs ({by}): {within}"
        is_loose = self.space.rules is not None and RANKS not in self.result.proven.certificate
        return f"{found} (the proof leaves out the rules on ranks)" if is_loose else found

    def __str__(self) -> str:
        lines = [
            "--- Sharding plan ---",
            *self.summary,
            "",
            *self._ranks(),
            "",
            *self._tables(),
            "",
            *self.kernel_lines,
            "",
            *self.assumption_lines,
        ]
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        result = self.result
        return {
            "headline": self.headline,
            "num_assumed": len(assumed_inputs(self.inputs)),
            "objective": objective_data(self.plan, result.proven),
            "search": {
                "seconds": self.seconds,
                "num_proposals": result.num_proposals,
                "num_placed": result.num_placed,
                "proposer": result.proposer,
            },
            "ranks": self.ranks,
            "tables": self.tables,
            "compute_kernels": self._kernels,
            "refusals": self.refusal_lines,
            "inputs": dict(self.inputs),
            "topology": self.space.topology.to_data(),
            "texts": {
                "summary": self.summary,
                "reserved": self.reserved_text,
                "kernels": self.kernel_lines,
                "assumptions": self.assumption_lines,
            },
        }

    def to_format(self, name: str, title: str = "Sharding plan") -> str:
        """Render the report in a format.

        Args:
            name: ``txt``, ``json``, or one that a plugin offers, as an extension at the point ``report``.
            title: heading, where the format has one.

        Raises:
            UnknownPluginError: no plugin offers the format.
        """
        return writer_of(name)(self, title)

    def _ranks(self) -> Iterator[str]:
        header = ("rank", *self.space.tiers, "time (ms)", "input (MB)", "output (MB)", "shards")
        rows, speeds = [_rank_cells(rank) for rank in self.ranks], self.space.topology.speeds
        if len(set(speeds)) > 1:
            header = ("rank", "speed", *header[1:])
            rows = [(row[0], f"{speed:.3g}", *row[1:]) for row, speed in zip(rows, speeds, strict=True)]
        yield aligned(header, rows)
        yield (
            f"  memory: weights, optimizer state, input and output; {self.reserved_text} is kept free\n"
            "  input, output: per step, MB = 10^6 bytes; time: of all shards together"
        )

    @property
    def reserved_text(self) -> str:
        """``15% of hbm``: what no shard may take."""
        usable, capacity = self.space.capacity_bytes, self.space.topology.capacity_bytes
        parts = [
            f"{1 - usable[:, tier].sum() / capacity[:, tier].sum():.0%} of {name}"
            for tier, name in enumerate(self.space.tiers)
            if capacity[:, tier].any() and (usable[:, tier] < capacity[:, tier]).any()
        ]
        return " and ".join(parts) or "nothing"

    def _tables(self) -> Iterator[str]:
        header = ["table", "sharding", "compute kernel", "time (ms)", "ranks"]
        rows = [
            [
                table["path"],
                f"{table['abbreviation']} ({', '.join(filter(None, [table['sharding_type'], table['variant']]))})",
                table["compute_kernel"],
                f"{table['time_ms']:.4g}",
                ranks_text(table["ranks"])
                + ", a copy on each" * (table["is_replicated"] and len(table["ranks"]) > 1),
            ]
            for table in self.tables
        ]
        codecs = [table.qcomms_config for table in self.space.options.all_tables]
        if any(codecs):
            header.append("codecs of results / gradients")
            rows = [[*row, codecs_text(config)] for row, config in zip(rows, codecs, strict=True)]
        yield aligned(header, rows)

    @property
    def _kernels(self) -> dict[str, int]:
        """Compute kernel -> how many tables it serves."""
        return dict(sorted(Counter(table["compute_kernel"] for table in self.tables).items()))

    @property
    def kernel_lines(self) -> list[str]:
        """List the kernels that were taken, the refusals that matter, and the names of what else was refused."""
        counts = ", ".join(f"{name}: {count}" for name, count in self._kernels.items())
        options = self.space.options
        taken = map(options.kernel_of, self.plan.proposal.tolist())
        taken_by = dict(zip((table.path for table in options.all_tables), taken, strict=True))
        told = [own for own in options.refusals if options.matters(own, taken_by[own.table])]
        lines = [*self._lines_of(told), *unasked_lines(options.refusals, told)]
        return [f"compute kernels: {counts}", *(f"  {line}" for line in lines)]

    @property
    def refusal_lines(self) -> list[str]:
        """List all refusals with tables, reasons and replacements; a line for each reason."""
        return self._lines_of(self.space.options.refusals)

    def _lines_of(self, refusals: Iterable[Refusal]) -> list[str]:
        tables: dict[tuple[str, str, str], list[str]] = {}
        for refusal in refusals:
            tables.setdefault((refusal.kind, refusal.name, refusal.reason), []).append(refusal.table)
        taken_by = {table["path"]: table["compute_kernel"] for table in self.tables}
        lines = []
        for (kind, name, reason), paths in tables.items():
            took = (
                _taken_instead(name, {taken_by[path] for path in paths}) if kind == "compute kernel" else ""
            )
            whom = repr(paths[0]) if len(paths) == 1 else f"{len(paths)} tables ({paths[0]!r}, ...)"
            lines.append(f"{kind} {name!r} refused for {whom}: {reason}{took}")
        return lines

    @property
    def assumption_lines(self) -> list[str]:
        """List the assumptions, with their sources, and what was measured and detected."""
        sourced = {
            name: f"  {name} = {value_text(name, data['value'])} ({data.get('source', '')})"
            for name, data in self.inputs.items()
            if "source" in data or data["provenance"] == "assumed"
        }
        detected = [
            f"  {name} = {value_text(name, data['value'])}"
            for name, data in self.inputs.items()
            if data["provenance"] == "detected"
        ]
        assumed = assumed_inputs(self.inputs)
        lines = ["assumed, because not given:", *(sourced.pop(name) for name in assumed)]
        lines += ["measured beforehand:", *sourced.values()] if sourced else []
        return [*lines, "detected on this machine:", *detected] if detected else lines


def writer_of(name: str) -> Callable[[Report, str], str]:
    """The function that renders a report in a format, with a title; see :meth:`Report.to_format`."""
    from shardwright.host.plugin_host import host

    own: Mapping[str, Callable[[Report, str], str]] = {
        "txt": lambda report, _: f"{report}\n",
        "json": lambda report, _: json_text(report.to_data()) + "\n",
    }
    if name in own:
        return own[name]
    page = load_at("report", name, host().extensions, besides=own)
    return lambda report, title: page(report.to_data(), title)


def objective_data(plan: LoadedPlan, proven: Proven) -> dict[str, Any]:
    """The objective of a plan, its value, its bound and the certificate of that, as JSON data."""
    value, bound = plan.value_ms, proven.bound_ms
    gap = gap_of(value, bound)
    return {
        "name": plan.space.objective,
        "value_ms": value,
        "lower_bound_ms": bound,
        "gap": gap if math.isfinite(gap) else None,
        "certificate": dict(proven.certificate),
    }


def unasked_lines(refusals: Iterable[Refusal], told: Iterable[Refusal]) -> list[str]:
    """A line with the names of what was refused and is not told of otherwise, if anything."""
    names = sorted({own.name for own in refusals} - {own.name for own in told})
    return [f"{len(names)} refused that nobody asked for: {', '.join(names)}"] if names else []


def _taken_instead(refused: str, taken: set[str]) -> str:
    """Name the kernels that were taken instead; a refused one may have been taken with another layout."""
    others = ", ".join(repr(name) for name in sorted(taken - {refused}))
    return f"; {others} taken" if others else f"; {refused!r} taken with another layout"


def value_text(name: str, value: Any) -> str:
    """An input's value with its unit."""
    if name.endswith("_cap") and not isinstance(value, list):
        return bytes_text(value)
    if name.endswith("_bw"):
        return f"{bytes_text(1000 * value)}/s"
    return str(value)


def _rank_cells(rank: Mapping[str, Any]) -> tuple[str, ...]:
    """A rank's row of a table: its number, memory tiers, time, input, output, shards."""
    counts = ", ".join(f"{name}: {count}" for name, count in rank["num_shards"].items())
    memory = zip(rank["used_bytes"].values(), rank["capacity_bytes"].values(), strict=True)
    return (
        str(rank["rank"]),
        *(f"{bytes_text(used)} ({100 * used / (capacity or 1):.0f}%)" for used, capacity in memory),
        f"{rank['time_ms']:.4g}",
        f"{rank['input_bytes'] / _MB:.2f}",
        f"{rank['output_bytes'] / _MB:.2f}",
        counts or "none",
    )
