"""Registered names that behave as members of an enumeration, for hands that know TorchRec's."""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

from shardwright.errors import UnknownPluginError
from shardwright.host.process import process_host

if TYPE_CHECKING:
    from shardwright.host.registry import Registry


class UnknownMemberError(UnknownPluginError, ValueError):
    """A contract was called with a name that nothing is registered under; enumerations raise a ``ValueError``."""


class Name(str):
    """A registered name that also has the ``value`` and the ``name`` of an enumeration's member.

    There is one object of each name, so that ``is`` compares them, copies too.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """The one object of a name."""
        return cast(Self, _one(cls, str(text)))

    @property
    def value(self) -> str:
        """The plain name."""
        return str(self)

    @property
    def name(self) -> str:
        """The name in capitals."""
        return self.upper()

    def __str__(self) -> str:
        return str.__str__(self)


@functools.cache
def _one(cls: type[Name], text: str) -> Name:
    """The one object of a name; there are as few as names in all registries."""
    return str.__new__(cls, text)


class OpenNames(ABCMeta):
    """Lets a contract stand for an enumeration of the names that are registered under it.

    ``Contract.SOME_NAME``, ``Contract["SOME_NAME"]`` and ``Contract("some_name")`` are the name ``"some_name"``, and a
    contract can be iterated, by names in their order. The registry is asked, not a list: a plugin's name is there as
    soon as the plugin is installed, and a misspelt one is an error that names the nearest.
    """

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("_") or not attribute.isupper():
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {attribute!r}")
        try:
            return Name(_registry(cls).canonical(attribute.lower()))
        except LookupError as error:
            raise AttributeError(str(error)) from error

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """The name that a contract is called with; an object of a plugin's class."""
        if _is_contract(cls) and len(args) == 1 and isinstance(args[0], str) and not kwargs:
            try:
                return Name(_registry(cls).canonical(args[0]))
            except UnknownPluginError as error:
                raise UnknownMemberError(*error.args, **error.facts) from None
        return super().__call__(*args, **kwargs)

    @property
    def __members__(cls) -> Mapping[str, Name]:
        """The registered names by their names in capitals, in their order, as an enumeration has them."""
        return MappingProxyType({name.name: name for name in cls})

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of the class's own ``__init__``, which :meth:`__call__` would hide."""
        if cls.__init__ is object.__init__:  # type: ignore[misc]
            return inspect.Signature()
        return inspect.signature(functools.partial(cls.__init__, None))  # type: ignore[misc]

    def __getitem__(cls, name: str) -> Name:
        """The name that is written in capitals."""
        return Name(_registry(cls).canonical(name.lower()))

    def __iter__(cls) -> Iterator[Name]:
        """The registered names, in their order."""
        return map(Name, _registry(cls))

    def __len__(cls) -> int:
        """Number of registered names."""
        return len(_registry(cls))

    def __bool__(cls) -> bool:
        """True, as of any class."""
        return True

    def __instancecheck__(cls, instance: Any) -> bool:
        """True for objects of the class, and for names registered under the contract."""
        if isinstance(instance, Name):
            return _is_contract(cls) and instance in _registry(cls)
        return super().__instancecheck__(instance)


def _is_contract(cls: type) -> bool:
    """True for a contract itself, not for what plugins derive from it."""
    return not any(isinstance(base, OpenNames) for base in cls.__bases__)


def _registry(cls: type) -> Registry[Any]:
    """The registry of a contract, or of the contract that a plugin's class derives from."""
    return cast("Registry[Any]", process_host().registry_of(cls))
