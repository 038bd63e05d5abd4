"""Attribute access to registered names, for hands that know TorchRec's enumerations."""

from __future__ import annotations

from abc import ABCMeta
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from shardwright.host.registry import Registry


class Name(str):
    """A registered name that also has the ``value`` of an enumeration's member."""

    __slots__ = ()

    @property
    def value(self) -> str:
        """The plain name."""
        return str(self)

    def __str__(self) -> str:
        return str.__str__(self)


class OpenNames(ABCMeta):
    """Lets ``Contract.SOME_NAME`` stand for the name ``"some_name"`` registered under that contract.

    The registry is asked, not a list: a plugin's name is there as soon as the plugin is installed, and a misspelt
    one is an ``AttributeError`` that names the nearest.
    """

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("_") or not attribute.isupper():
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {attribute!r}")
        from shardwright.host.plugin_host import host

        registry: Registry[Any] = host().registry_of(cast(type[Any], cls))
        try:
            return Name(registry.canonical(attribute.lower()))
        except LookupError as error:
            raise AttributeError(str(error)) from error
