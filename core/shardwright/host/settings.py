"""The configuration of the plugin host.

It is three environment variables, so that it reaches every rank that a launcher starts:

- `SHARDWRIGHT_PLUGINS=a,b` loads only these plugins (names of entry points); empty loads none; `-a,-b` loads
  all others.
- `SHARDWRIGHT_STRICT_PLUGINS=1` raises when a plugin fails to load or two claim one name, and not only when
  something of theirs is asked for.
- `SHARDWRIGHT_PREFER=name=distribution,...` chooses where several distributions offer one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from shardwright.errors import InvalidInputError, UnknownPluginError, nearest

PLUGINS_VARIABLE = "SHARDWRIGHT_PLUGINS"
STRICT_VARIABLE = "SHARDWRIGHT_STRICT_PLUGINS"
PREFER_VARIABLE = "SHARDWRIGHT_PREFER"


@attrs.frozen
class PluginSettings:
    """Selection of plugins to load, strictness, and preferred distributions.

    Attributes:
        selection: The plugins to load, or with a leading hyphen to leave out; None loads all.
        strict: Whether a plugin that fails to load is an error at once.
        preferred: name -> the distribution that is to have it.
    """

    selection: tuple[str, ...] | None
    strict: bool
    preferred: Mapping[str, str]

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> PluginSettings:
        """Read the three variables.

        Raises:
            InvalidInputError: If one is malformed.
        """
        selection = environment.get(PLUGINS_VARIABLE)
        return cls(
            None if selection is None else _split(selection),
            _read_switch(STRICT_VARIABLE, environment.get(STRICT_VARIABLE, "")),
            _read_preferences(environment.get(PREFER_VARIABLE, "")),
        )

    def choose(self, installed: Iterable[str]) -> frozenset[str]:
        """Choose which of the installed plugins to load.

        Raises:
            UnknownPluginError: If one is selected, or turned off, that is not installed.
            InvalidInputError: If some are selected and others turned off.
        """
        installed = frozenset(installed)
        if self.selection is None:
            return installed
        off = [name.removeprefix("-") for name in self.selection if name.startswith("-")]
        if off and len(off) < len(self.selection):
            raise InvalidInputError(
                f"{PLUGINS_VARIABLE}={','.join(self.selection)!r} selects plugins and turns others off. "
                "Do one of both."
            )
        named = frozenset(off or self.selection)
        for name in sorted(named - installed):
            raise UnknownPluginError(
                f"{PLUGINS_VARIABLE} names the plugin {name!r}, which is not installed. "
                f"Installed: {', '.join(sorted(installed)) or 'none'}.{nearest(name, installed)}"
            )
        return installed - named if off else named


def _split(value: str) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in value.split(",")) if part)


def _read_switch(variable: str, value: str) -> bool:
    switches = {"1": True, "true": True, "yes": True, "on": True}
    switches |= {"": False, "0": False, "false": False, "no": False, "off": False}
    switch = switches.get(value.strip().lower())
    if switch is None:
        raise InvalidInputError(f"{variable}={value!r}: expected 1 or 0.")
    return switch


def _read_preferences(value: str) -> Mapping[str, str]:
    preferred: dict[str, str] = {}
    for part in _split(value):
        name, equals, distribution = (text.strip() for text in part.partition("="))
        if not (name and equals and distribution):
            raise InvalidInputError(
                f"{PREFER_VARIABLE}={value!r}: {part!r} is not of the form name=distribution."
            )
        if preferred.setdefault(name, distribution) != distribution:
            raise InvalidInputError(f"{PREFER_VARIABLE}={value!r} gives {name!r} to two distributions.")
    return preferred
