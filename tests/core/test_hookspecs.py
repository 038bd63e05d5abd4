"""Every hook, with plugins that implement it. `kind` goes over all kinds."""

from __future__ import annotations

import inspect

import pytest

from shardwright import ShardingType, hookspecs
from shardwright.hookspecs import KINDS
from shardwright.host import PluginHost


def host_with(plugin):
    return PluginHost(entry_points=[], plugins={"made": plugin}, environment={})


def test_hook_of_a_kind_is_specified_and_documented(kind):
    function = getattr(hookspecs, kind.hook)
    assert not inspect.signature(function).parameters
    assert len(inspect.getdoc(function).splitlines()) > 2
    assert [other.hook for other in KINDS].count(kind.hook) == 1


def test_hook_classes_come_to_their_registry_and_to_no_other(kind, make_offer):
    items, plugin = make_offer(["first", "second"])
    host = host_with(plugin)
    registry = getattr(host, kind.label)
    assert registry is host.registry_of(kind.contract)
    assert {name: registry[name] for name in registry} == dict(zip(["first", "second"], items, strict=True))
    assert [other.names for other in host.registries if other is not registry] == [()] * (len(KINDS) - 1)


def test_hook_instances_come_to_their_registry(kind, make_offer):
    items, plugin = make_offer(["first"])
    instance = items[0]()
    items[:] = [instance]
    assert host_with(plugin).registry_of(kind.contract).create("first") is instance


def test_hook_abstract_class_is_refused_naming_methods(kind, make_offer):
    items, plugin = make_offer([])
    items.append(type(kind.contract)("Unfinished", (kind.contract,), {"name": "unfinished"}))
    (record,) = host_with(plugin).plugins
    assert record.state == "failed"
    missing = ", ".join(sorted(kind.contract.__abstractmethods__))
    assert record.reason.endswith(f"Unfinished does not implement {missing}.")


@pytest.mark.parametrize("answer", [None, 3, "rows", ShardingType, {"rows": ShardingType}, iter(())])
def test_hook_answer_that_is_no_list_is_refused_with_what_was_got(kind, make_offer, answer):
    from shardwright import hookimpl

    _, plugin = make_offer([])
    setattr(plugin, kind.hook, hookimpl(lambda: answer))
    (record,) = host_with(plugin).plugins
    assert record.reason == (
        f"its hook {kind.hook} returned {answer!r}; it must return a list or tuple of {kind.title}s."
    )
