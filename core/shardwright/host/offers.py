"""Offers of a plugin: kind, contract, names and origin, checked one by one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast

import attrs

from shardwright.errors import PluginLoadError

CONTRACT_VERSION = 1
"""The version of the contracts (`api` of a plugin module, or of what it offers) that this release fulfils."""

C = TypeVar("C")

# The distribution that this module is in; what it offers is there in any case.

# What a comma-separated option, an environment variable and a plan document can carry unquoted.
_USABLE_NAME = re.compile(r"[^\s,=]+")


@attrs.frozen
class Provenance:
    """Origin of an offer: the plugin, and its distribution.

    Attributes:
        plugin: The name of the entry point.
        distribution: The name of the installed distribution.
        version: Its version, empty if unknown.
        module: The module that the entry point names.
        file: The file of that module, empty if unknown.
    """

    plugin: str
    distribution: str
    version: str = ""
    module: str = ""
    file: str = ""

    def __str__(self) -> str:
        """`'skew' from acme-shard 0.3.1`, as error texts say it."""
        return f"{self.plugin!r} from {self.package}"

    @property
    def package(self) -> str:
        """`acme-shard 0.3.1`."""
        return f"{self.distribution} {self.version}".rstrip()

    def is_from(self, distribution: str) -> bool:
        """True if this is the distribution of that name, spelt in any of the ways that packaging allows."""
        return normalized(self.distribution) == normalized(distribution)


@attrs.frozen
class Entry(Generic[C]):
    """One registered thing: `item` is what the plugin offered, a class or an instance."""

    name: str
    item: type[C] | C
    provenance: Provenance
    aliases: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """All words that this entry claims: its name and its aliases."""
        return (self.name, *self.aliases)


@attrs.frozen
class Kind(Generic[C]):
    """One of the kinds of things that plugins offer, and all that belongs to it.

    The rows of `shardwright.hookspecs.KINDS` are the only list of kinds: registries, commands, stubs, pages and tests
    derive from it.

    Attributes:
        name: The name of the kind, such as `sharding_type`; also that of the fixture of its conformance tests.
        hook: The hook that offers it, such as `shardwright_sharding_types`.
        contract: The abstract class that it fulfils.
        kit: The class of its conformance tests, as `module.Class` of `shardwright_testing`.
        template: The folder of files that `shardwright plugin new` fills in.
        page: The page for authors, below `shardwright/docs/authors`.
    """

    name: str
    hook: str
    contract: type[C]
    kit: str
    template: str
    page: str

    @property
    def title(self) -> str:
        """Words for one of this kind in texts, such as `sharding type`."""
        return self.name.replace("_", " ")

    @property
    def label(self) -> str:
        """The short name in documents and fingerprints, such as `sharding_types`."""
        return self.hook.removeprefix("shardwright_")


def make_entry(kind: Kind[C], item: object, provenance: Provenance) -> Entry[C]:
    """Check that `item` fulfils the contract of its kind, and describe it.

    Raises:
        PluginLoadError: If it is no class or instance of the contract, leaves methods abstract, has no usable
            name, or was written for another version of the contracts.
    """
    contract = kind.contract
    if not (issubclass(item, contract) if isinstance(item, type) else isinstance(item, contract)):
        got = f"the class {qualified(item)}" if isinstance(item, type) else f"{item!r}"
        raise PluginLoadError(
            f"{kind.hook} offers {got}, which is no subclass or instance of {qualified(contract)}."
        )
    check_version(item, f"{kind.title} {qualified(item)}")
    if isinstance(item, type) and inspect.isabstract(item):
        missing = ", ".join(sorted(cast(Any, item).__abstractmethods__))
        raise PluginLoadError(f"{kind.title} {qualified(item)} does not implement {missing}.")
    name, aliases = _names_of(kind, item)
    return Entry(name, cast("type[C] | C", item), provenance, aliases)


def check_version(owner: object, what: str) -> None:
    """Check the `api` that a plugin module or an offered item declares, if it declares one.

    Raises:
        PluginLoadError: If it is not the version of the contracts that this release fulfils.
    """
    version = getattr(owner, "api", CONTRACT_VERSION)
    # A package may have a submodule called `api`, which then is an attribute of it.
    if inspect.ismodule(version):
        return
    if type(version) is not int or version != CONTRACT_VERSION:
        raise PluginLoadError(
            f"{what} declares api = {version!r}; this shardwright supports api = {CONTRACT_VERSION}. "
            "Install a release of one that fits the other."
        )


def normalized(distribution: str) -> str:
    """The one spelling of a distribution's name (the rule of PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def qualified(item: object) -> str:
    """Module and name of a class, or of the class of an instance, as texts say it."""
    owner = item if isinstance(item, type) else type(item)
    return f"{owner.__module__}.{owner.__qualname__}"


def _names_of(kind: Kind[Any], item: object) -> tuple[str, tuple[str, ...]]:
    """The name and the aliases that an item declares, checked."""
    name = getattr(item, "name", None)
    aliases = getattr(item, "aliases", ())
    what = f"{kind.title} {qualified(item)}"
    if not _is_usable(name):
        raise PluginLoadError(
            f"{what} has the name {name!r}; a name is a text without spaces, commas and equals signs."
        )
    if isinstance(aliases, str) or not isinstance(aliases, Iterable):
        raise PluginLoadError(f"{what} has aliases = {aliases!r}; aliases are a tuple of names.")
    aliases = tuple(aliases)
    for alias in aliases:
        if not _is_usable(alias):
            raise PluginLoadError(
                f"{what} has the alias {alias!r}; an alias is a text without spaces, commas and equals signs."
            )
    return cast(str, name), tuple(alias for alias in dict.fromkeys(aliases) if alias != name)


def _is_usable(name: object) -> bool:
    return isinstance(name, str) and _USABLE_NAME.fullmatch(name) is not None
