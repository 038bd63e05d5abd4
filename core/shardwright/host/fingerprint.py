"""Fingerprint that the ranks of one job must share: the plugins, and the names that each one serves.

A rank with another plugin would take other decisions than its peers and wait in a collective for them without
end. So all ranks compare fingerprints when a process group starts, and all raise if one differs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import attrs

from shardwright.errors import PluginMismatchError
from shardwright.host.settings import PLUGINS_VARIABLE, PREFER_VARIABLE

# A text that names every one of a thousand ranks helps nobody.
_MAX_RANKS_NAMED = 8  # ranks in an error; the others are counted


@attrs.frozen(order=True)
class PluginIdentity:
    """One loaded plugin as other ranks see it.

    Attributes:
        distribution: The name of the installed distribution.
        version: Its version.
        plugin: The name of the entry point.
        names: What it serves, as `sharding_types:row_wise`, sorted.
    """

    distribution: str
    version: str
    plugin: str
    names: tuple[str, ...] = ()


def _sort(plugins: Iterable[PluginIdentity]) -> tuple[PluginIdentity, ...]:
    return tuple(sorted(plugins))


@attrs.frozen
class Fingerprint:
    """All loaded plugins of one process, sorted. Equal fingerprints mean that ranks decide alike.

    Attributes:
        plugins: The loaded plugins.
        not_loaded: `(plugin, reason)` of those that are installed and not loaded. It explains a difference
            and is none itself: what is not loaded on one rank and not installed on another serves nothing on both.
    """

    plugins: tuple[PluginIdentity, ...] = attrs.field(converter=_sort)
    not_loaded: tuple[tuple[str, str], ...] = attrs.field(default=(), eq=False)


def compare_fingerprints(fingerprints: Sequence[Fingerprint]) -> None:
    """Raise if the ranks of a job differ in their plugins. Every rank calls it with the same list.

    Args:
        fingerprints: One a rank, in the order of ranks.

    Raises:
        PluginMismatchError: Names the ranks that differ from the majority, and in which plugins.
    """
    if len(set(fingerprints)) <= 1:
        return
    # The most frequent one; among equals that of the lowest rank, because a Counter keeps the order of
    # insertion.
    majority = Counter(fingerprints).most_common(1)[0][0]
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, fingerprint in enumerate(fingerprints):
        for difference in _differences(fingerprint, majority):
            ranks_of[difference].append(rank)
    told = "; ".join(f"{name_ranks(ranks)}: {difference}" for difference, ranks in ranks_of.items())
    raise PluginMismatchError(
        f"the {len(fingerprints)} ranks of this job have different plugins: {told}. "
        f"They are compared with rank {fingerprints.index(majority)}. "
        "Install the same distributions on all ranks, and give all of them the same "
        f"{PLUGINS_VARIABLE} and {PREFER_VARIABLE}."
    )


def _differences(mine: Fingerprint, majority: Fingerprint) -> list[str]:
    """List a rank's differences from the majority."""
    ours, theirs = _by_plugin(mine.plugins), _by_plugin(majority.plugins)
    reasons = dict(mine.not_loaded)
    differences = []
    for key in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(key), theirs.get(key)
        if here != there:
            differences.append(_difference(here, there, reasons))
    return differences


def _difference(here: PluginIdentity | None, there: PluginIdentity | None, reasons: dict[str, str]) -> str:
    if here is None:
        assert there is not None
        reason = reasons.get(there.plugin, "")
        return f"plugin {_describe(there)} is missing" + (f" ({reason})" if reason else "")
    if there is None:
        return f"plugin {_describe(here)} is there, unlike on the others"
    if here.version != there.version:
        return f"plugin {_describe(here)} instead of version {there.version}"
    lacks = sorted(set(there.names) - set(here.names))
    adds = sorted(set(here.names) - set(there.names))
    changes = [f"without {', '.join(lacks)}"] if lacks else []
    changes += [f"with {', '.join(adds)} in addition"] if adds else []
    return f"plugin {_describe(here)} {' and '.join(changes)}"


def _by_plugin(plugins: Iterable[PluginIdentity]) -> dict[tuple[str, str], PluginIdentity]:
    return {(identity.distribution, identity.plugin): identity for identity in plugins}


def _describe(identity: PluginIdentity) -> str:
    return f"{identity.plugin!r} from {identity.distribution} {identity.version}".rstrip()


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a text: ``rank 1``, ``ranks 0, 2``; of more than eight the others are counted."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:_MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - _MAX_RANKS_NAMED} more" if len(ranks) > _MAX_RANKS_NAMED else ""
    return f"ranks {named}{more}"
