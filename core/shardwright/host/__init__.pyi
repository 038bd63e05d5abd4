# Made by `python -m tests.core.stubs`.
from shardwright.host.fingerprint import Fingerprint as Fingerprint
from shardwright.host.fingerprint import compare_fingerprints as compare_fingerprints
from shardwright.host.plugin_host import PluginHost as PluginHost
from shardwright.host.plugin_host import host as host
from shardwright.host.plugin_host import use_host as use_host
from shardwright.host.registry import Registry as Registry

__all__: list[str]
