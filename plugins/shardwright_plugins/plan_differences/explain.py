"""Explanation of a table's sharding: its option, the runner-up, and what ruled the others out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from attrs import frozen

from shardwright.errors import UnknownNameError, nearest
from shardwright.host.plugin_host import host
from shardwright.planning.options.options import Refusal
from shardwright.planning.options.rank_rules import RankRules
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.report.report import unasked_lines
from shardwright.planning.search.loaded import LoadedPlan
from shardwright.planning.search.objectives import OBJECTIVES
from shardwright.planning.search.placement import Misfit, fixed_misfit, propose
from shardwright.planning.search.ruled_placement import place_within
from shardwright.planning.tables.spec import TableSpec
from shardwright.planning.text import bytes_text
from shardwright_plugins.plan_differences.measure import Measure
from shardwright_plugins.plan_differences.rederived import Rederived


@frozen
class ExplainedOption:
    """One way to shard the table, all other tables as they are in the plan.

    Args:
        sharding_type: its name.
        variant: variant of the layout; empty where there is one only.
        compute_kernel: its name.
        num_shards: into how many blocks the table is cut.
        total_ms: time of all its shards together, on their ranks; where it does not fit, the mean over ranks.
        largest_ms: time of its slowest shard, on its rank; where it does not fit, on the fastest rank.
        largest_bytes: memory tier -> what its largest shard needs.
        value_ms: ``measure`` of :class:`Explanation` of the plan with this option in place of the table's own, placed
            as the planner's partitioner does; infinite where it does not fit.
        reason: obstacle that rules it out, or makes it worse than the plan.
    """

    sharding_type: str
    variant: str
    compute_kernel: str
    num_shards: int
    total_ms: float
    largest_ms: float
    largest_bytes: Mapping[str, int]
    value_ms: float
    reason: str = ""

    @property
    def name(self) -> str:
        """``row_wise / fused``."""
        variant = f" ({self.variant})" if self.variant else ""
        return f"{self.sharding_type}{variant} / {self.compute_kernel}"


@frozen
class Explanation:
    """Explanation of a table's sharding.

    Args:
        table: the table.
        value_ms: ``measure`` of the plan.
        chosen: its option in the plan.
        others: the other options, those first that would make the best plans.
        refusals: refused sharding types and kernels, with reasons.
        measure: name of what plans were compared by: the objective, or ``"step's time by 'NAME'"``
            where the estimator of that name compares plans by it (``Estimator.step_phases``).
        that_matter: those of them that were asked for, or are kernels preferred to the one that was taken.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables([sw.TableSpec("user", 1_000_000, 64, ["user"])])
        >>> explanation = sw.explain_table(sw.ShardingPlan.from_json(plan.to_json()), "user")
        >>> explanation.table.name, len(explanation.others) > 0
        ('user', True)
    """

    table: TableSpec
    value_ms: float
    chosen: ExplainedOption
    others: tuple[ExplainedOption, ...]
    refusals: tuple[Refusal, ...]
    measure: str
    that_matter: tuple[Refusal, ...]

    @property
    def runner_up(self) -> ExplainedOption | None:
        """The best of the other options that fit, if one does."""
        return next((option for option in self.others if math.isfinite(option.value_ms)), None)


def explain_table(plan: ShardingPlan, table: str) -> Explanation:
    """Explain the choice for one table of a plan from a planner's document.

    Args:
        plan: the plan.
        table: the table's name, or its path.

    Raises:
        UnknownNameError: the plan has no such table; the text has the nearest.
        PlanError: the document does not say what the planner was asked, or a table's shards are those of no option.

    Example:
        >>> import shardwright as sw
        >>> tables = [sw.TableSpec("user", 1_000_000, 64, ["user"]), sw.TableSpec("shop", 1000, 64, ["shop"])]
        >>> planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cuda"), batch_size=512)
        >>> plan = planner.plan_tables(tables)
        >>> explanation = sw.explain_table(sw.ShardingPlan.from_json(plan.to_json()), "user")
        >>> explanation.table.name
        'user'
    """
    again = Rederived.of(plan, host())
    return _Explainer(again, _position(again, table)).explanation()


def _position(again: Rederived, name: str) -> int:
    tables = again.options.all_tables
    known = [table.path for table in tables]
    if name in known:
        return known.index(name)
    named = [position for position, table in enumerate(tables) if table.name == name]
    if len(named) > 1:
        paths = ", ".join(repr(known[position]) for position in named)
        raise UnknownNameError(
            f"{len(named)} tables of the plan are named {name!r}: {paths}. Give the path of one."
        )
    if named:
        return named[0]
    raise UnknownNameError(
        f"the plan has no table {name!r}. It has {len(known)}: {', '.join(known[:8])}"
        f"{', ...' if len(known) > 8 else ''}.{nearest(name, known)}"
    )


class _Explainer:
    """Puts each option of one table in the place of its own."""

    def __init__(self, again: Rederived, table: int) -> None:
        self._again, self._plan, self._table = again, again.loaded_plan(), table
        self._space, self._options = again.space, again.options
        self._measure, plan = Measure(again.plugins.performance, self._space), self._plan
        self._own = int(plan.proposal[table])
        others = plan.ranks[plan.shards.table != table]
        self._rest = LoadedPlan(self._space, np.delete(plan.proposal, table), others)
        self._rules = self._rules_beside(plan.ranks_of_tables)
        self._is_by_step = self._measure.step_of(plan.phases_ms, plan.proposal) is not None
        self._plan_ms = self._measure.of(plan.phases_ms, plan.proposal)

    def explanation(self) -> Explanation:
        """All options, the best first."""
        distinct = int(self._options.distinct_table[self._table])
        explained = {option: self._explained(option) for option in self._options.of_table(distinct)}
        chosen = explained.pop(self._own)
        others = sorted(
            explained.values(), key=lambda option: (option.value_ms, option.total_ms, option.name)
        )
        spec = self._options.all_tables[self._table]
        refusals = tuple(attrs.evolve(r, table=spec.path) for r in self._options.refused[distinct])
        taken = self._options.kernel_of(self._own)
        told = tuple(own for own in refusals if self._options.matters(own, taken))
        by_step = f"step's time by {self._measure.performance.name!r}"
        measure = by_step if self._is_by_step else self._space.objective
        return Explanation(spec, self._plan_ms, chosen, tuple(others), refusals, measure, told)

    def _rules_beside(self, used: Sequence[Sequence[int]]) -> RankRules | None:
        """The ranks that the table may use beside others on these ranks, as a rule; ``None``: any.

        Args:
            used: the ranks of each of all tables.
        """
        rules, own = self._space.rules, self._table
        if rules is None:
            return None
        mates = {*rules.together.get(own, ())} - {own}
        rivals = {table for group in rules.apart if own in group for table in group} - {own}
        allowed = rules.allowed(own).intersection(*(used[table] for table in mates))
        allowed = allowed.difference(*(used[table] for table in rivals))
        return RankRules(rules.topology, rules.tables, {own: allowed})

    def _explained(self, option: int) -> ExplainedOption:
        space, options = self._space, self._options
        value, ranks, reason = self._placed(option)
        total_ms, largest_ms = self._times(option, ranks)
        return ExplainedOption(
            sharding_type=options.type_of(option).name,
            variant=options.layouts[option].variant,
            compute_kernel=options.kernel_of(option).name,
            num_shards=int(options.shards_per_option[option]),
            total_ms=total_ms,
            largest_ms=largest_ms,
            largest_bytes=dict(zip(space.tiers, space.largest_bytes[option].tolist(), strict=True)),
            value_ms=value,
            reason=reason or self._comparison(value),
        )

    def _times(self, option: int, ranks: Sequence[int]) -> tuple[float, float]:
        """Times of all shards of an option and of the slowest one, ms; without ranks, wherever they may go."""
        space = self._space
        if not ranks:
            return float(space.total_cost_ms[option]), float(space.largest_cost_ms[option])
        times = space.on_ranks(self._options.spread(space.class_ms, option), np.array(ranks))
        return float(times.sum()), float(times.max())

    def _placed(self, option: int) -> tuple[float, Sequence[int], str]:
        """The plan's measure with this option, all other tables as they are, and its ranks; or why it does not fit."""
        if option == self._own:
            return self._plan_ms, self._plan.ranks_of_tables[self._table], "in the plan"
        alone = np.array([option])
        shards = propose(self._space, alone)
        shards = attrs.evolve(
            shards,
            table=np.full(len(shards), self._table),
            fixed_ms=shards.fixed_ms + self._rest.load_ms,
            fixed_bytes=shards.fixed_bytes + self._rest.used_bytes,
        )
        misfit = fixed_misfit(self._space, alone, shards)
        placed = misfit or place_within(self._rules, self._again.plugins.partitioner, shards)
        if isinstance(placed, Misfit):
            return math.inf, (), self._why_misfit(option, placed)
        own = LoadedPlan(self._space, alone, placed, shards)
        phases = {phase: own.phases_ms[phase] + rest for phase, rest in self._rest.phases_ms.items()}
        chosen = self._plan.proposal.copy()
        chosen[self._table] = option
        return self._measure.of(phases, chosen), own.ranks_of_tables[0], ""

    def _why_misfit(self, option: int, misfit: Misfit) -> str:
        tier = self._space.tiers.index(misfit.tier)
        needs = f"a shard needs {bytes_text(self._space.largest_bytes[option, tier])} of {misfit.tier}"
        most = int(self._space.capacity_bytes[:, tier].max())
        unlike = len(self._space.topology.classes) > 1
        times = "; its times are the mean over ranks, and the slowest shard's on the fastest rank" * unlike
        if self._space.largest_bytes[option, tier] > most:
            return f"does not fit: {needs}, no rank has more than {bytes_text(most)}{times}"
        left = int((self._space.capacity_bytes - self._rest.used_bytes)[misfit.rank, tier])
        if misfit.needed_bytes <= left:
            return f"does not fit on the ranks that constraints leave beside the other tables{times}"
        left_text = f"they leave {bytes_text(left)} on rank {misfit.rank}"
        return f"does not fit beside the other tables: {needs}; {left_text}{times}"

    def _comparison(self, value_ms: float) -> str:
        plan_ms, what = self._plan_ms, "a step" if self._is_by_step else "the plan"
        told = f"{what} would take {value_ms:.4g} ms"
        if value_ms > 2 * plan_ms:
            return f"{told}, {value_ms / max(plan_ms, 1e-300):.3g} times as long"
        if value_ms > plan_ms * (1 + 1e-9):
            return f"{told}, {value_ms / plan_ms - 1:.2%} more"
        if value_ms < plan_ms * (1 - 1e-9):
            return f"{told}, {1 - value_ms / plan_ms:.2%} less"
        return f"as good: {what} would take as long"


def explanation_lines(explanation: Explanation) -> Sequence[str]:
    """An explanation in words, without the table of all options."""
    chosen, runner_up = explanation.chosen, explanation.runner_up
    what = "the plan takes" if explanation.measure in OBJECTIVES else f"chosen by the {explanation.measure}:"
    lines = [
        f"{explanation.table.describe()}: {chosen.name}, {chosen.num_shards} "
        f"shard{'s' * (chosen.num_shards > 1)}, {chosen.total_ms:.4g} ms together, the slowest "
        f"{chosen.largest_ms:.4g} ms; {what} {explanation.value_ms:.4g} ms",
        f"runner-up: {runner_up.name}: {runner_up.reason}" if runner_up else "runner-up: none fits",
    ]
    told = (f"not an option: {refusal}" for refusal in dict.fromkeys(explanation.that_matter))
    return [*lines, *told, *unasked_lines(explanation.refusals, explanation.that_matter)]
