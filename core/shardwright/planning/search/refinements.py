"""Refinements of a search: what changes the question before it, or the plan after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve, field, frozen

from shardwright.arguments import brief
from shardwright.contracts.estimator import Estimator
from shardwright.errors import InvalidInputError
from shardwright.host.extensions import load_at
from shardwright.planning.machines.topology import InputValue
from shardwright.planning.named_plugins import made_with, split_name
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.plugin_calls import calling, check_answer
from shardwright.planning.search.placement import Placed
from shardwright.planning.search.search import SearchResult, with_plan
from shardwright.planning.watch import Watch

if TYPE_CHECKING:
    from shardwright.contracts.extension import Extension
    from shardwright.host.registry import Registry

REFINEMENT = "refinement"
"""The point of refinements; each loads a class or function that makes one."""


@frozen(eq=False)
class Outcome:
    """Outcome of a search, and what it was asked.

    Args:
        request: constraints, topology and batch size that it was made for.
        space: options and costs.
        result: the plan, or what came nearest to one.
        performance: estimator that the costs are by.
        inputs: values that the plan document states beside its inputs, by name.
        notes: sentences for the report.
    """

    request: Request
    space: SearchSpace
    result: SearchResult
    performance: Estimator
    inputs: Mapping[str, InputValue] = field(factory=dict)
    notes: tuple[str, ...] = ()

    def with_plan(self, placed: Placed, who: str = "a refinement") -> Outcome:
        """The outcome with another plan of the same options, which is rated.

        Raises:
            PlanningError: it is no such plan, or does not fit; the text begins with ``who``.
        """
        return evolve(self, result=with_plan(self.space, self.result, placed, who))


Search: TypeAlias = Callable[[Request, Watch], Outcome]
"""A search, which ends with its watch; it may have found no plan."""

Refinement: TypeAlias = Callable[[Search, Request, Watch], Outcome]
"""A function of a search, the request to it and the watch over all: it returns what was found, or something better."""


def refined(name: str, refinement: Refinement, search: Search) -> Search:
    """A search with a refinement around it.

    Args:
        name: name of the refinement, for errors.
        refinement: the refinement. A plan that it returns is checked and rated.
        search: the search inside it.
    """
    who = f"refinement {name!r}"

    def run(request: Request, watch: Watch) -> Outcome:
        with calling(who):
            found = refinement(search, request, watch)
        check_answer(who, "refinement", found, Outcome)
        plan = found.result.plan
        if plan is None:
            return found
        return found.with_plan(Placed(plan.proposal, plan.ranks), who)

    return run


def named_refinements(
    asked: Iterable[str | Refinement], registry: Registry[Extension]
) -> dict[str, Callable[[], Refinement]]:
    """Makers of the refinements that a user asked for, by their names, in their order.

    Args:
        asked: refinements, or names of extensions at the point ``refinement``, with arguments as those of proposers.
        registry: the extensions that are installed.

    Raises:
        UnknownPluginError: nothing has this name.
        InvalidInputError: it is no refinement; a maker raises it where the refinement does not take these arguments.
    """
    found: dict[str, Callable[[], Refinement]] = {}
    for one in asked:
        if isinstance(one, str):
            name, arguments = split_name(registry, one)
            make = load_at(REFINEMENT, name, registry)
            found[name] = partial(made_with, make, f"refinement {name!r}", arguments)
        elif callable(one) and not isinstance(one, type):
            found[getattr(one, "__name__", type(one).__name__)] = partial(lambda given: given, one)
        else:
            raise InvalidInputError(f"refinements are names of refinements, or functions; got {brief(one)}")
    return found
