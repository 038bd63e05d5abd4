"""The plugin host: finds the installed plugins, loads them once, and keeps what they offer in registries.

Nobody else touches pluggy. Discovery happens on first use, not at import; a plugin that fails is recorded and
the rest goes on; the outcome depends on what is installed and configured, never on an order.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from shardwright.contracts import (
    Codec,
    CommBackend,
    ComputeKernel,
    Estimator,
    Extension,
    Optimizer,
    Partitioner,
    Proposer,
    ShardingType,
)
from shardwright.errors import (
    DuplicateNameError,
    InvalidInputError,
    PluginLoadError,
    ShardwrightError,
)
from shardwright.hookspecs import KINDS
from shardwright.host.fingerprint import Fingerprint, PluginIdentity
from shardwright.host.loading import PluginRecord, Source, load_plugin
from shardwright.host.offers import Entry, Kind, Provenance, normalized
from shardwright.host.registry import Registry
from shardwright.host.settings import PLUGINS_VARIABLE, PluginSettings

GROUP = "shardwright"
"""The entry-point group of plugins."""

C = TypeVar("C")
_log = logging.getLogger("shardwright.plugins")  # a name that users configure


@attrs.frozen
class _Discovered:
    """The outcome of discovery."""

    records: tuple[PluginRecord, ...]
    registries: Mapping[type, Registry[Any]]


class PluginHost:
    """The plugins of a process, and what they offer.

    Most code uses the process-wide one, `host()`. A host of your own has its own plugins and registries: one for each
    row of `KINDS`, as an attribute (`host().sharding_types`) and by its contract (`registry_of`).
    """

    sharding_types: Registry[ShardingType]
    proposers: Registry[Proposer]
    estimators: Registry[Estimator]
    partitioners: Registry[Partitioner]
    compute_kernels: Registry[ComputeKernel]
    comm_backends: Registry[CommBackend]
    optimizers: Registry[Optimizer]
    codecs: Registry[Codec]
    extensions: Registry[Extension]

    def __init__(
        self,
        *,
        entry_points: Iterable[EntryPoint] | None = None,
        plugins: Mapping[str, object] = MappingProxyType({}),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is discovered yet.

        Args:
            entry_points: The installed plugins. By default those of the group `shardwright` of all
                distributions.
            plugins: name -> an object or module with hooks, beside the installed ones and without a
                distribution.
            environment: Where the configuration stands. By default that of the process, read on discovery.
        """
        self._entry_points = entry_points
        self._plugins = dict(plugins)
        self._environment = environment
        self._lock = threading.RLock()
        self._discovering = False
        self._discovered: _Discovered | None = None

    if not TYPE_CHECKING:  # so that a misspelt attribute is still found by type checkers

        def __getattr__(self, name: str) -> Registry[Any]:
            """The registry of a kind, by its label: `host().sharding_types`."""
            for kind in KINDS:
                if kind.label == name:
                    return self.registry_of(kind.contract)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def registries(self) -> tuple[Registry[Any], ...]:
        """All of them, in the order of `KINDS`."""
        return tuple(self._discover().registries.values())

    @property
    def plugins(self) -> tuple[PluginRecord, ...]:
        """State of each installed plugin, sorted by name."""
        return self._discover().records

    def registry_of(self, contract: type[C]) -> Registry[C]:
        """The registry of a contract, or of a class that fulfils one.

        Raises:
            InvalidInputError: If it is none of the contracts.
        """
        registries = self._discover().registries
        for owner in contract.__mro__:
            if owner in registries:
                return cast("Registry[C]", registries[owner])
        known = ", ".join(kind.contract.__name__ for kind in KINDS)
        raise InvalidInputError(f"{contract!r} is none of the contracts. Known: {known}.")

    def replacing(self, item: object) -> PluginHost:
        """A host in which one thing has its name and aliases, whatever has them here: for tests of plugins.

        Raises:
            InvalidInputError: If it is a class or an instance of none of the contracts.
            PluginLoadError: If it does not fulfil its contract.
        """
        owner: type[Any] = item if isinstance(item, type) else type(item)
        registry: Registry[Any] = self.registry_of(owner).replacing(item)
        registries = {**self._discover().registries, registry.kind.contract: registry}
        made = PluginHost()
        made._discovered = attrs.evolve(self._discover(), registries=MappingProxyType(registries))
        return made

    def fingerprint(self) -> Fingerprint:
        """Return what must be the same on all ranks of a job: the loaded plugins and the names that each serves."""
        discovered = self._discover()
        names: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for record in discovered.records:
            if record.state == "loaded":
                names[_identity(record.provenance)] = []
        for registry in discovered.registries.values():
            for entry in registry.entries.values():
                names[_identity(entry.provenance)].append(f"{registry.kind.label}:{entry.name}")
        return Fingerprint(
            [PluginIdentity(*identity, tuple(sorted(served))) for identity, served in names.items()],
            tuple(
                (record.provenance.plugin, record.reason)
                for record in discovered.records
                if record.state != "loaded"
            ),
        )

    def _discover(self) -> _Discovered:
        """Find and load all plugins, once."""
        if self._discovered is not None:
            return self._discovered
        with self._lock:
            if self._discovering:
                raise PluginLoadError(
                    "a plugin asks for plugins while it is being loaded. "
                    "Move that from its module, or its hook, into the methods of what it offers."
                )
            if self._discovered is None:
                self._discovering = True
                try:
                    self._discovered = self._load_all()
                finally:
                    self._discovering = False
            return self._discovered

    def _load_all(self) -> _Discovered:
        settings = PluginSettings.read(os.environ if self._environment is None else self._environment)
        sources = self._find()
        chosen = settings.choose(source.provenance.plugin for source in sources)
        records = tuple(
            load_plugin(source, KINDS) if source.provenance.plugin in chosen else _off(source, settings)
            for source in sources
        )
        registries = {kind.contract: _make_registry(kind, records, settings) for kind in KINDS}
        _report(records, registries.values(), strict=settings.strict)
        return _Discovered(records, MappingProxyType(registries))

    def _find(self) -> list[Source]:
        """The installed plugins, sorted by name: the order of directory listings means nothing."""
        entry_points = self._entry_points
        if entry_points is None:
            entry_points = importlib.metadata.entry_points(group=GROUP)
        sources = [Source.from_entry_point(entry_point) for entry_point in entry_points]
        sources += [Source.in_process(name, plugin) for name, plugin in self._plugins.items()]
        return sorted(
            sources,
            key=lambda source: (source.provenance.plugin, normalized(source.provenance.distribution)),
        )


_process_host = PluginHost()


def host() -> PluginHost:
    """The plugin host of this process. It discovers the installed plugins on first use."""
    return _process_host


@contextlib.contextmanager
def use_host(replacement: PluginHost) -> Iterator[PluginHost]:
    """Let `host()` give another host inside a `with` block, in all threads: for tests of plugins."""
    global _process_host
    previous, _process_host = _process_host, replacement
    try:
        yield replacement
    finally:
        _process_host = previous


def _off(source: Source, settings: PluginSettings) -> PluginRecord:
    assert settings.selection is not None, "without a selection every plugin is loaded"
    return PluginRecord(
        source.provenance, "off", f"off by {PLUGINS_VARIABLE}={','.join(settings.selection)!r}"
    )


def _make_registry(kind: Kind[C], records: Sequence[PluginRecord], settings: PluginSettings) -> Registry[C]:
    entries: list[Entry[C]] = [entry for record in records for entry in record.entries.get(kind.hook, ())]
    withheld = {
        name: _withhold(kind, name, record)
        for record in records
        for name in record.claimed.get(kind.hook, ())
    }
    return Registry(
        kind, entries, preferred=settings.preferred, withheld=withheld, not_loaded=_tell_not_loaded(records)
    )


def _withhold(kind: Kind[Any], name: str, record: PluginRecord) -> Callable[[], ShardwrightError]:
    """The error of asking for something that a failed plugin would have offered."""

    def make() -> ShardwrightError:
        error = PluginLoadError(
            f"the {kind.title} {name!r} is not there, because plugin {record.provenance} failed to load: "
            f"{_sentence(record.reason)} {_tell_switch([record])}"
        )
        error.__cause__ = record.error
        return error

    return make


def _tell_not_loaded(records: Iterable[PluginRecord]) -> str:
    """The end of a text about an unknown name, with a leading space; nothing if all plugins are loaded."""
    missing = [record for record in records if record.state != "loaded"]
    if not missing:
        return ""
    told = ", ".join(f"{record.provenance} ({record.reason.rstrip('.')})" for record in missing)
    failed = [record for record in missing if record.state == "failed"]
    return f" Not loaded: {told}." + (f" {_tell_switch(failed)}" if failed else "")


def _tell_switch(failed: Iterable[PluginRecord]) -> str:
    names = ",".join(f"-{record.provenance.plugin}" for record in failed)
    return f"Repair or uninstall it, or turn it off with {PLUGINS_VARIABLE}={names}."


def _report(records: Iterable[PluginRecord], registries: Iterable[Registry[Any]], *, strict: bool) -> None:
    """Log what went wrong, or raise it.

    Raises:
        PluginLoadError: In strict mode, if plugins failed; the text names them all.
        DuplicateNameError: In strict mode, if names are claimed by several.
    """
    failed = [record for record in records if record.state == "failed"]
    conflicts = [str(error) for registry in registries for error in registry.conflicts.values()]
    failures = [
        f"plugin {record.provenance} failed to load: {_sentence(record.reason)} {_tell_switch([record])}"
        for record in failed
    ]
    if strict and failures:
        raise PluginLoadError("\n".join(failures + conflicts)) from failed[0].error
    if strict and conflicts:
        raise DuplicateNameError("\n".join(conflicts))
    for text in failures + conflicts:
        _log.warning("%s", text)


def _identity(provenance: Provenance) -> tuple[str, str, str]:
    return (provenance.distribution, provenance.version, provenance.plugin)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
