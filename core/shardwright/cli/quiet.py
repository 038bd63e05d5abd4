"""A plugin host for commands that tell themselves what is wrong with plugins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.host.plugin_host import PluginHost


def quiet_host(environment: Mapping[str, str]) -> PluginHost:
    """A host that neither logs plugins that failed nor, in strict mode, raises.

    Args:
        environment: The variables that choose plugins.
    """
    from shardwright.host.plugin_host import PluginHost
    from shardwright.host.settings import STRICT_VARIABLE

    logging.getLogger(PluginHost.__module__).setLevel(logging.ERROR)
    return PluginHost(environment={**environment, STRICT_VARIABLE: ""})
