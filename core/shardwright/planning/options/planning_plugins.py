"""The plugins that plan: chosen by name, given as objects, or the preferred ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import asdict, field, frozen

from shardwright.contracts.estimator import PERFORMANCE, STORAGE, Estimator
from shardwright.contracts.partitioner import Partitioner
from shardwright.contracts.proposer import Proposer
from shardwright.errors import InvalidInputError, UnknownPluginError
from shardwright.planning.machines.topology import Topology
from shardwright.planning.named_plugins import make_plugin
from shardwright.planning.plugin_calls import calling, check_answer
from shardwright.planning.tables.option_space import OptionSpace

if TYPE_CHECKING:
    from shardwright.host.plugin_host import PluginHost
    from shardwright.host.registry import Registry

_Plugin = TypeVar("_Plugin", Estimator, Proposer, Partitioner)


@frozen(eq=False)
class PlanningPlugins:
    """The plugins that plan.

    Args:
        performance: the performance estimator.
        storage: the storage estimator.
        proposers: proposers in the order they run.
        partitioner: places proposals.
        option_space: options offered to tables without constraints; ``None``: those whose time the performance
            estimator can tell.
        plugin_host: registries that these plugins, sharding types and kernels come from.
        given: JSON data of what was chosen and not merely preferred, by the planner's argument.
    """

    performance: Estimator
    storage: Estimator
    proposers: tuple[Proposer, ...]
    partitioner: Partitioner
    plugin_host: PluginHost = field(repr=False)
    option_space: OptionSpace | None = None
    given: Mapping[str, Any] = field(factory=dict)

    def offered_space(self, topology: Topology) -> OptionSpace:
        """Return the options that are offered to tables without constraints."""
        if self.option_space is not None:
            return self.option_space
        who = f"estimator {self.performance.name!r}"
        with calling(who):
            answer = self.performance.option_space(topology)
        check_answer(who, "option_space", answer, OptionSpace)
        return answer


@frozen(eq=False)
class PluginChoice:
    """Choice of planning plugins by the user: names, objects, or nothing."""

    estimator: str | Estimator | None = None
    storage_estimator: str | Estimator | None = None
    proposer: str | Proposer | Sequence[str | Proposer] | None = None
    partitioner: str | Partitioner | None = None
    option_space: OptionSpace | None = None

    def resolve(self, plugin_host: PluginHost, topology: Topology | None = None) -> PlanningPlugins:
        """The plugins themselves: what was chosen, and the preferred ones for the rest.

        Args:
            plugin_host: registries of installed plugins.
            topology: the ranks, which a preferred estimator must serve; ``None``: any.

        Raises:
            UnknownPluginError: a name is not known, or nothing is loaded that may be taken unasked.
            InvalidInputError: an estimator measures something else.
        """
        return PlanningPlugins(
            performance=_estimator(
                plugin_host.estimators, self.estimator, PERFORMANCE, "estimator", topology
            ),
            storage=_estimator(
                plugin_host.estimators, self.storage_estimator, STORAGE, "storage_estimator", topology
            ),
            option_space=self.option_space,
            proposers=tuple(self._proposers(plugin_host.proposers)),
            partitioner=(
                _preferred(plugin_host.partitioners)[0]
                if self.partitioner is None
                else make_plugin(plugin_host.partitioners, self.partitioner, "partitioner")
            ),
            plugin_host=plugin_host,
            # What was chosen is known to be of its kind by now.
            given={
                name: _as_data(value)
                for name, value in asdict(self, recurse=False).items()
                if value is not None
            },
        )

    def _proposers(self, registry: Registry[Proposer]) -> list[Proposer]:
        asked = self.proposer
        if asked is None:
            return _preferred(registry)
        given = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
        if not given:
            raise InvalidInputError("proposer is an empty list; name at least one, or leave it out")
        return [make_plugin(registry, item, "proposer") for item in given]


def _as_data(chosen: Any) -> Any:
    """A choice as JSON data: a name, several names, or an option space."""
    if isinstance(chosen, OptionSpace):
        return chosen.to_data()
    if isinstance(chosen, str):
        return chosen
    return [_as_data(item) for item in chosen] if isinstance(chosen, Sequence) else str(chosen.name)


def origin(registry: Registry[Any], plugin: Any) -> dict[str, str]:
    """A plugin by kind and name, and the distribution and version it comes from, as JSON data.

    These are empty for an object that no plugin offers.
    """
    data = {"kind": registry.kind.label, "name": str(plugin.name)}
    entry = registry.entries.get(plugin.name)
    if entry is None or (entry.item is not plugin and entry.item is not type(plugin)):
        return {**data, "distribution": "", "version": ""}
    return {**data, "distribution": entry.provenance.distribution, "version": entry.provenance.version}


def _preferred(registry: Registry[_Plugin], measures: str | None = None) -> list[_Plugin]:
    """The plugins of a kind that may be taken unasked, the most preferred first."""
    plugins = [registry.create(name) for name in registry]
    kept = [plugin for plugin in plugins if measures is None or getattr(plugin, "measures", None) == measures]
    willing = [plugin for plugin in kept if plugin.preference > 0]
    if not willing:
        what = f"{measures} {registry.kind.title}" if measures else registry.kind.title
        raise UnknownPluginError(
            f"no {what} is loaded that may be taken unasked. Known: {', '.join(registry.names) or 'none'}. "
            "Name one, or load the built-in plugins (SHARDWRIGHT_PLUGINS, `shardwright plugins`)."
        )
    return sorted(willing, key=lambda plugin: (-plugin.preference, plugin.name))


def _estimator(
    registry: Registry[Estimator],
    asked: str | Estimator | None,
    measures: str,
    argument: str,
    topology: Topology | None,
) -> Estimator:
    if asked is None:
        preferred = _preferred(registry, measures)
        return next((own for own in preferred if topology is None or own.serves(topology)), preferred[-1])
    estimator = make_plugin(registry, asked, argument)
    if estimator.measures != measures:
        fitting = [name for name in registry if registry.create(name).measures == measures]
        raise InvalidInputError(
            f"{argument} {estimator.name!r} measures {estimator.measures}, a {measures} estimator is needed: "
            f"{', '.join(fitting) or 'none is loaded'}"
        )
    return estimator
