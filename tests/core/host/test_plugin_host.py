from __future__ import annotations

import re
import threading

import pytest

from shardwright import (
    DuplicateNameError,
    InvalidInputError,
    PluginLoadError,
    UnknownPluginError,
    hookimpl,
)
from shardwright.host import PluginHost

ALL = (
    "acme-bad-import",
    "acme-duplicate-one",
    "acme-duplicate-two",
    "acme-exits",
    "acme-good",
    "acme-misspelt",
    "acme-raises",
    "acme-slow",
    "acme-wrong-api",
    "acme-wrong-class-api",
)


def host_of(entry_points, **environment):
    variables = {f"SHARDWRIGHT_{name}": value for name, value in environment.items()}
    return PluginHost(entry_points=entry_points, environment=variables)


def reasons(plugin_host):
    return {
        record.provenance.plugin: record.reason for record in plugin_host.plugins if record.state == "failed"
    }


def test_host_replacing_keeps_what_else_is_there_and_tells_ranks(installed, sharding_type):
    first = host_of(installed("acme-good", "acme-bad-import"))
    item = sharding_type("good")()
    second = first.replacing(item).replacing(sharding_type("more")())
    assert second.sharding_types["good"] is item
    assert second.sharding_types.names == ("good", "more")
    assert isinstance(first.sharding_types["good"], type)
    assert second.plugins == first.plugins
    assert second.fingerprint() != first.fingerprint()
    with pytest.raises(InvalidInputError):
        first.replacing(3)


def test_host_all_broken_plugins_leave_good_ones_loaded(installed):
    host = host_of(installed(*ALL))
    assert host.sharding_types.names == ("good", "only_one", "only_two", "slow")
    assert set(reasons(host)) == {
        "acme_bad_import",
        "acme_exits",
        "acme_misspelt",
        "acme_raises",
        "acme_wrong_api",
        "acme_wrong_class_api",
    }


@pytest.mark.parametrize(
    ("distribution", "reason"),
    [
        ("acme-bad-import", "ModuleNotFoundError: No module named 'acme_needs_this'"),
        ("acme-exits", "SystemExit: no licence"),
        (
            "acme-misspelt",
            "it implements an unknown hook 'shardwright_sharding_type'. .*"
            r"Did you mean 'shardwright_sharding_types'\?",
        ),
        ("acme-raises", "its hook shardwright_comm_backends raised ValueError: no such device"),
        ("acme-wrong-api", "its module declares api = 2; this shardwright supports api = 1"),
        (
            "acme-wrong-class-api",
            "sharding type acme_wrong_class_api.Newer declares api = 7; this shardwright supports api = 1",
        ),
    ],
)
def test_host_broken_plugin_is_recorded_with_provenance_and_cause(installed, site, distribution, reason):
    (record,) = host_of(installed(distribution)).plugins
    assert record.state == "failed"
    assert re.match(reason, record.reason), record.reason
    assert record.provenance.distribution == distribution
    assert record.provenance.file == str(site / f"{distribution.replace('-', '_')}.py")
    assert record.error is not None
    assert not record.entries


def test_host_unknown_name_tells_failed_plugin_with_cause_and_switch(installed):
    with pytest.raises(UnknownPluginError) as caught:
        _ = host_of(installed("acme-good", "acme-bad-import")).sharding_types["goood"]
    assert str(caught.value) == (
        "no sharding type 'goood'. Known: good. Did you mean 'good'? Not loaded: 'acme_bad_import' from "
        "acme-bad-import 0.3.1 (ModuleNotFoundError: No module named 'acme_needs_this'). "
        "Repair or uninstall it, or turn it off with SHARDWRIGHT_PLUGINS=-acme_bad_import."
    )


def test_host_name_of_half_loaded_plugin_raises_and_registers_nothing(installed):
    host = host_of(installed("acme-raises"))
    assert list(host.sharding_types) == []
    with pytest.raises(PluginLoadError) as caught:
        host.sharding_types["half"]
    text = str(caught.value)
    assert "'half' is not there, because plugin 'acme_raises' from acme-raises 0.5 failed" in text
    assert "ValueError: no such device" in text
    assert "SHARDWRIGHT_PLUGINS=-acme_raises" in text
    assert caught.value.__cause__ is host.plugins[0].error


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (" acme_good , acme_slow,", ["good", "slow"]),
        ("-acme_bad_import", ["good", "slow"]),
        ("", []),
    ],
)
def test_host_selection_is_of_names_or_of_what_is_left_out(installed, selection, names):
    points = installed("acme-good", "acme-slow", "acme-bad-import")
    host = host_of(points, PLUGINS=selection, STRICT_PLUGINS="1")
    assert list(host.sharding_types) == names
    assert all(list(registry) == [] for registry in host.registries if registry is not host.sharding_types)
    assert {record.state for record in host.plugins} <= {"off", "loaded"}


def test_host_selection_of_unknown_plugin_raises_with_nearest(installed):
    with pytest.raises(UnknownPluginError, match=r"'acme_god', which is not .* mean 'acme_good'\?"):
        _ = host_of(installed("acme-good"), PLUGINS="acme_god").plugins


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PLUGINS", "acme_good,-acme_slow"),
        ("STRICT_PLUGINS", "perhaps"),
        ("PREFER", "contested"),
        ("PREFER", "contested="),
        ("PREFER", "a=b,a=c"),
    ],
)
def test_host_malformed_configuration_raises_naming_variable(installed, variable, value):
    with pytest.raises(InvalidInputError, match=f"SHARDWRIGHT_{variable}"):
        _ = host_of(installed("acme-good", "acme-slow"), **{variable: value}).plugins


def test_host_strict_raises_at_load_and_names_every_failure(installed):
    with pytest.raises(PluginLoadError) as caught:
        _ = host_of(installed("acme-good", "acme-raises", "acme-bad-import"), STRICT_PLUGINS="1").proposers
    assert "'acme_bad_import' from acme-bad-import 0.3.1" in str(caught.value)
    assert "'acme_raises' from acme-raises 0.5" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_host_strict_raises_on_conflict(installed):
    with pytest.raises(DuplicateNameError, match="contested"):
        _ = host_of(installed("acme-duplicate-one", "acme-duplicate-two"), STRICT_PLUGINS="true").proposers


def test_host_failures_are_logged_once_with_switch(installed, caplog):
    host = host_of(installed("acme-good", "acme-raises"))
    assert [host.plugins, host.plugins, host.sharding_types]
    (message,) = caplog.messages
    assert message.startswith("plugin 'acme_raises' from acme-raises 0.5 failed to load:")
    assert "SHARDWRIGHT_PLUGINS=-acme_raises" in message


def test_host_discovers_installed_distributions_by_entry_point(run_source):
    found = run_source(
        """
        import json, sys
        import shardwright
        host = shardwright.host.host()
        before = "acme_slow" in sys.modules
        entry = host.sharding_types.entry("good").provenance
        after = "acme_slow" in sys.modules
        print(json.dumps([before, after, entry.plugin, entry.distribution, entry.version]))
        """
    )
    assert found == [False, True, "acme_good", "acme-good", "1.2.0"]


def test_host_never_imports_plugins_that_are_off(run_source):
    found = run_source(
        """
        import json, sys
        import shardwright
        names = list(shardwright.host.host().sharding_types)
        print(json.dumps([names, "acme_slow" in sys.modules, "acme_bad_import" in sys.modules]))
        """,
        SHARDWRIGHT_PLUGINS="acme_good",
    )
    assert found == [["good"], False, False]


def unmarked(plugin):
    plugin.shardwright_proposers = lambda: []
    return plugin


def with_arguments(plugin):
    plugin.shardwright_proposers = hookimpl(lambda topology: [])
    return plugin


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda plugin_of, named: object(), r"it implements no hook\."),
        (
            lambda plugin_of, named: unmarked(plugin_of()),
            r"its shardwright_proposers is not marked with @shardwright\.hookimpl\.$",
        ),
        (lambda plugin_of, named: with_arguments(plugin_of()), r".*shardwright_proposers.*topology"),
        (
            lambda plugin_of, named: plugin_of(named("rows"), named("columns", aliases=("rows",))),
            r"it offers two sharding types under the name 'rows'\.$",
        ),
    ],
    ids=["no hooks", "no marker", "arguments", "one name twice"],
)
def test_host_plugin_of_a_wrong_form_is_refused(plugin_of, sharding_type, make, reason):
    plugins = {"wrong": make(plugin_of, sharding_type)}
    found = reasons(PluginHost(entry_points=[], plugins=plugins, environment={}))["wrong"]
    assert re.match(reason, found), found


def test_host_plugin_package_with_submodule_called_api_loads(plugin_of, sharding_type):
    plugin = plugin_of(sharding_type("rows"), api=threading)
    assert list(PluginHost(entry_points=[], plugins={"p": plugin}, environment={}).sharding_types) == ["rows"]


def test_host_plugin_that_asks_host_while_loading_is_refused(plugin_of):
    plugin = plugin_of()
    asking = PluginHost(entry_points=[], plugins={"curious": plugin}, environment={})
    plugin.shardwright_proposers = hookimpl(lambda: list(asking.sharding_types))
    assert "asks for plugins while it is being loaded" in reasons(asking)["curious"]


def test_host_hooks_are_called_once(plugin_of, sharding_type):
    calls = []
    plugin = plugin_of()
    plugin.shardwright_proposers = hookimpl(lambda: calls.append(1) or [])
    host = PluginHost(entry_points=[], plugins={"counted": plugin}, environment={})
    threads = [threading.Thread(target=lambda: host.proposers) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(calls) == 1
