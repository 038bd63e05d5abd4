"""The one registry: the names of one kind of thing, what stands behind each, and where it came from."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast

from shardwright.errors import DuplicateNameError, ShardwrightError, UnknownPluginError, nearest
from shardwright.host.offers import Entry, Kind, Provenance, make_entry, normalized, qualified
from shardwright.host.settings import PREFER_VARIABLE

C = TypeVar("C")


class Registry(Generic[C]):
    """Names of one kind: look-up by name or alias, iteration in the order of names.

    Everything known is given at once, so that the outcome cannot depend on the order in which plugins were
    found: all claims on a name are gathered, then checked, then applied. A name that is claimed by different
    things and that `preferred` does not settle is withheld: asking for it, or iterating, raises and names
    both distributions.
    """

    def __init__(
        self,
        kind: Kind[C],
        entries: Iterable[Entry[C]] = (),
        *,
        preferred: Mapping[str, str] = MappingProxyType({}),
        withheld: Mapping[str, Callable[[], ShardwrightError]] = MappingProxyType({}),
        not_loaded: str = "",
    ) -> None:
        """Gather, check and apply the claims.

        Args:
            kind: What is registered here.
            entries: What is offered, in any order.
            preferred: Which distribution is to have a name, where several claim it.
            withheld: Names that nobody offers for a reason that is known, and the error that tells it.
            not_loaded: The end of the text for unknown names: which plugins are not there, and why.
        """
        self.kind = kind
        self.not_loaded = not_loaded
        self._entries: dict[str, Entry[C]] = {}
        self._aliases: dict[str, str] = {}
        self._conflicts: dict[str, DuplicateNameError] = {}
        self._withheld = dict(withheld)
        self._apply(list(entries), preferred)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that can be had, sorted. Names in conflict are not among them."""
        return tuple(sorted(self._entries))

    @property
    def entries(self) -> Mapping[str, Entry[C]]:
        """A read-only view: name -> entry, of the names that can be had."""
        return MappingProxyType(self._entries)

    @property
    def conflicts(self) -> Mapping[str, DuplicateNameError]:
        """A read-only view: name -> the error that asking for it raises."""
        return MappingProxyType(self._conflicts)

    def __iter__(self) -> Iterator[str]:
        """The names, sorted.

        Raises:
            DuplicateNameError: If a name is in conflict, because going on without it would go unnoticed.
        """
        for error in self._conflicts.values():
            raise _again(error)
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """True if asking for this name or alias gives something."""
        return name in self._entries or name in self._aliases

    def __getitem__(self, name: str) -> type[C] | C:
        """Return the class or instance offered under this name or alias. Raises as `entry` does."""
        return self.entry(name).item

    def __repr__(self) -> str:
        return f"<Registry of {self.kind.label}: {', '.join(self.names) or 'empty'}>"

    def entry(self, name: str) -> Entry[C]:
        """The entry of a name or an alias.

        Raises:
            UnknownPluginError: If nothing has this name. The text has the known names, the nearest, and which
                plugins are not loaded.
            DuplicateNameError: If several plugins claim it.
            PluginLoadError: If a plugin that failed to load would have offered it.
        """
        found = self._entries.get(self._aliases.get(name, name))
        if found is not None:
            return found
        if name in self._conflicts:
            raise _again(self._conflicts[name])
        if name in self._withheld:
            raise self._withheld[name]()
        known = ", ".join(self.names) or "none"
        near = nearest(name, [*self._entries, *self._aliases])
        raise UnknownPluginError(
            f"no {self.kind.title} {name!r}. Known: {known}.{near}{self.not_loaded}",
            subject=self.kind.title,
            asked=name,
            possible=self.names,
        )

    def canonical(self, name: str) -> str:
        """The name that stands for this name or alias. Raises as `entry` does."""
        return self.entry(name).name

    def create(self, name: str) -> C:
        """An instance of what has this name: a class is called, an instance given as it is. Raises as `entry` does."""
        item = self.entry(name).item
        return cast(C, item()) if isinstance(item, type) else item

    def register(self, item: type[C] | C, provenance: Provenance | None = None) -> Entry[C]:
        """Add one thing in this process, without a distribution: for notebooks and tests.

        The same thing again is nothing.

        Raises:
            DuplicateNameError: If a different thing has one of its words. The registry stays as it was.
            PluginLoadError: If it does not fulfil the contract.
        """
        entry = make_entry(self.kind, item, provenance or _provenance_of(item))
        for word in entry.words:
            if word in self._conflicts:
                raise _again(self._conflicts[word])
            if word in self and self.entry(word).item is not item:
                raise _conflict(self.kind, word, [self.entry(word), entry], "")
        if entry.name not in self._entries:
            self._add(entry, entry.words)
        return self._entries[entry.name]

    def replacing(self, item: type[C] | C) -> Registry[C]:
        """A copy in which one thing has its name and aliases, whatever has them here.

        Raises:
            PluginLoadError: If it does not fulfil the contract.
        """
        entry, made = make_entry(self.kind, item, _provenance_of(item)), copy.copy(self)
        free = set(entry.words)
        made._entries = {name: each for name, each in self._entries.items() if name not in free}
        made._aliases = {
            word: name for word, name in self._aliases.items() if word not in free and name in made._entries
        }
        made._conflicts = {word: error for word, error in self._conflicts.items() if word not in free}
        made._withheld = {word: error for word, error in self._withheld.items() if word not in free}
        made._add(entry, entry.words)
        return made

    def _apply(self, entries: list[Entry[C]], preferred: Mapping[str, str]) -> None:
        claims: dict[str, list[Entry[C]]] = defaultdict(list)
        for entry in _without_repetitions(entries):
            for word in entry.words:
                claims[word].append(entry)
        owners: dict[str, Entry[C]] = {}
        for word, claimants in sorted(claims.items()):
            chosen = _choose(claimants, preferred.get(word))
            if chosen is None:
                self._conflicts[word] = _conflict(self.kind, word, claimants, preferred.get(word, ""))
            else:
                owners[word] = chosen
        for word, entry in owners.items():
            if word == entry.name:
                self._add(entry, [claimed for claimed in entry.words if owners.get(claimed) is entry])

    def _add(self, entry: Entry[C], words: Iterable[str]) -> None:
        self._entries[entry.name] = entry
        self._aliases.update({word: entry.name for word in words if word != entry.name})


def _without_repetitions(entries: Iterable[Entry[C]]) -> list[Entry[C]]:
    """Each item once, however many plugins offer it, in an order that is independent of the given one."""
    kept: dict[int, Entry[C]] = {}
    for entry in sorted(entries, key=_order):
        kept.setdefault(id(entry.item), entry)
    return list(kept.values())


def _order(entry: Entry[Any]) -> tuple[str, ...]:
    origin = entry.provenance
    return (entry.name, normalized(origin.distribution), origin.version, origin.plugin, origin.module)


def _choose(claimants: list[Entry[C]], preferred: str | None) -> Entry[C] | None:
    """The only claimant, or the only one from the preferred distribution."""
    if len(claimants) > 1 and preferred is not None:
        claimants = [entry for entry in claimants if entry.provenance.is_from(preferred)]
    return claimants[0] if len(claimants) == 1 else None


def _conflict(kind: Kind[Any], word: str, claimants: list[Entry[Any]], preferred: str) -> DuplicateNameError:
    offers = " and by ".join(f"{qualified(entry.item)} of plugin {entry.provenance}" for entry in claimants)
    distributions = sorted({entry.provenance.distribution for entry in claimants})
    text = f"the {kind.title} {word!r} is offered by {offers}."
    if preferred:
        text += f" {PREFER_VARIABLE} prefers {preferred!r}, which does not settle it."
    if len(distributions) > 1:
        choices = " or ".join(f"{PREFER_VARIABLE}={word}={distribution}" for distribution in distributions)
        return DuplicateNameError(f"{text} Choose one: set {choices}.")
    return DuplicateNameError(f"{text} Rename one, or turn one of the plugins off.")


def _again(error: DuplicateNameError) -> DuplicateNameError:
    """A fresh copy to raise: an exception that is raised twice collects the tracebacks of both."""
    return type(error)(*error.args)


def _provenance_of(item: object) -> Provenance:
    owner = item if isinstance(item, type) else type(item)
    return Provenance(plugin=owner.__qualname__, distribution="this process", module=owner.__module__)
