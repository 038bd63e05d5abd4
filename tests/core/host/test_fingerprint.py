from __future__ import annotations

import pickle

import pytest

from shardwright.errors import PluginMismatchError
from shardwright.host import PluginHost
from shardwright.host.fingerprint import Fingerprint, PluginIdentity, compare_fingerprints

GOOD = PluginIdentity("acme-good", "1.2.0", "acme_good", ("sharding_types:good",))
SKEW = PluginIdentity("acme-skew", "0.3.1", "skew", ("sharding_types:skewed",))


def host_of(entry_points, **environment):
    variables = {f"SHARDWRIGHT_{name}": value for name, value in environment.items()}
    return PluginHost(entry_points=entry_points, environment=variables)


def test_fingerprint_is_the_same_in_any_order_and_survives_transport(installed):
    points = installed("acme-good", "acme-slow", "acme-duplicate-one")
    fingerprint = host_of(points).fingerprint()
    assert host_of(points[::-1]).fingerprint() == fingerprint
    assert pickle.loads(pickle.dumps(fingerprint)) == fingerprint


def test_fingerprint_follows_preference(installed):
    points = installed("acme-duplicate-one", "acme-duplicate-two")
    one = host_of(points, PREFER="contested=acme-duplicate-one").fingerprint()
    two = host_of(points, PREFER="contested=acme-duplicate-two").fingerprint()
    with pytest.raises(PluginMismatchError, match=r"rank 1: .*sharding_types:contested"):
        compare_fingerprints([one, two])


def test_fingerprint_has_what_was_registered_in_process(installed, sharding_type):
    host = host_of(installed("acme-good"))
    before = host.fingerprint()
    host.sharding_types.register(sharding_type("mine"))
    with pytest.raises(PluginMismatchError, match="rank 1: plugin 'Made' from this process is there"):
        compare_fingerprints([before, host.fingerprint(), before])


def test_compare_fingerprints_that_do_not_differ_raises_nothing():
    compare_fingerprints([])
    compare_fingerprints([Fingerprint([GOOD])])
    compare_fingerprints([Fingerprint([GOOD, SKEW]), Fingerprint([SKEW, GOOD])] * 3)
    # Off here, and not installed there.
    compare_fingerprints([Fingerprint([GOOD], (("skew", "off"),)), Fingerprint([GOOD])])


def test_compare_missing_plugin_names_rank_plugin_and_why():
    both, one = Fingerprint([GOOD, SKEW]), Fingerprint([GOOD], (("skew", "ImportError: no fbgemm"),))
    with pytest.raises(PluginMismatchError) as caught:
        compare_fingerprints([both, both, one])
    text = str(caught.value)
    assert "the 3 ranks of this job have different plugins" in text
    assert "rank 2: plugin 'skew' from acme-skew 0.3.1 is missing (ImportError: no fbgemm)" in text
    assert "rank 0" in text
    assert "acme-good" not in text


@pytest.mark.parametrize(
    ("fingerprints", "text"),
    [
        (
            [Fingerprint([GOOD]), Fingerprint([GOOD, SKEW]), Fingerprint([GOOD])],
            r"rank 1: plugin 'skew' from acme-skew 0\.3\.1 is there, unlike",
        ),
        (
            [Fingerprint([SKEW]), Fingerprint([PluginIdentity("acme-skew", "0.4", "skew", SKEW.names)])],
            r"rank 1: plugin 'skew' from acme-skew 0\.4 instead of version 0\.3\.1",
        ),
        (
            [Fingerprint([GOOD])] * 30 + [Fingerprint([])] * 12,
            "ranks 30, 31, 32, 33, 34, 35, 36, 37 and 4 more: plugin",
        ),
    ],
    ids=["one more", "another version", "many ranks"],
)
def test_compare_of_different_plugins_names_rank_plugin_and_version(fingerprints, text):
    with pytest.raises(PluginMismatchError, match=text):
        compare_fingerprints(fingerprints)
