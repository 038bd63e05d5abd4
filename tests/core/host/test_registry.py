from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright import (
    DuplicateNameError,
    PluginLoadError,
    ShardingType,
    ShardwrightError,
)
from shardwright.hookspecs import KINDS
from shardwright.host.offers import Entry, Provenance, make_entry
from shardwright.host.registry import Registry

KIND = next(kind for kind in KINDS if kind.contract is ShardingType)
ONE = Provenance("one", "acme-one", "1.0", "acme_one", "/acme_one.py")
TWO = Provenance("two", "Acme_Two", "2.0", "acme_two", "/acme_two.py")


def entry(item: object, provenance: Provenance = ONE) -> Entry[ShardingType]:
    return make_entry(KIND, item, provenance)


def test_registry_same_item_twice_is_one(sharding_type):
    item = sharding_type("rows")
    registry = Registry(KIND, [entry(item, TWO), entry(item, ONE)])
    assert registry["rows"] is item
    assert not registry.conflicts
    assert registry.register(item) is registry.entry("rows")


@pytest.mark.parametrize("spelling", ["Acme_Two", "acme-two", "ACME.TWO"])
def test_registry_conflict_with_preference_gives_preferred(sharding_type, spelling):
    chosen = sharding_type("rows")
    entries = [entry(sharding_type("rows"), ONE), entry(chosen, TWO)]
    registry = Registry(KIND, entries, preferred={"rows": spelling})
    assert registry["rows"] is chosen
    assert list(registry) == ["rows"]


@pytest.mark.parametrize(
    ("other", "preferred", "text"),
    [
        (TWO, {}, "'rows'"),
        (TWO, {"rows": "acme-three"}, "prefers 'acme-three', which does not settle it"),
        (Provenance("other", "acme-one", "1.0"), {}, "Rename one"),
    ],
)
def test_registry_conflict_that_is_not_settled_says_what_would(sharding_type, other, preferred, text):
    entries = [entry(sharding_type("rows"), ONE), entry(sharding_type("rows"), other)]
    registry = Registry(KIND, entries, preferred=preferred)
    for use in (list, lambda own: own["rows"]):
        with pytest.raises(DuplicateNameError, match=text):
            use(registry)


def test_registry_register_adds_and_refuses_other_item_of_same_name(sharding_type):
    registry = Registry(KIND, [entry(sharding_type("rows"))])
    mine = sharding_type("mine", aliases=("m",))
    assert registry.register(mine).provenance.distribution == "this process"
    assert registry["m"] is mine
    with pytest.raises(DuplicateNameError, match="'rows'"):
        registry.register(sharding_type("rows"))
    with pytest.raises(DuplicateNameError, match="'m'"):
        registry.register(sharding_type("yours", aliases=("m",)))
    assert list(registry) == ["mine", "rows"]


def test_registry_replacing_gives_the_thing_its_words_and_leaves_the_rest(sharding_type):
    old, other = sharding_type("rows", aliases=("rw",)), sharding_type("slices", aliases=("by_row", "cut"))
    contested = [entry(sharding_type("by_hand"), origin) for origin in (ONE, TWO)]
    registry = Registry(KIND, [entry(old), entry(other), *contested])
    new = sharding_type("rows", aliases=("by_row", "by_hand"))()
    replaced = registry.replacing(new)
    assert [replaced[word] for word in ("rows", "by_row", "by_hand")] == [new] * 3
    assert (replaced["slices"], replaced["cut"]) == (other, other)
    assert "rw" not in replaced
    assert list(replaced) == ["rows", "slices"]
    assert (registry["rows"], registry["rw"], registry["by_row"]) == (old, old, other)
    assert list(registry.conflicts) == ["by_hand"]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        *(({"name": name}, f"has the name {name!r}") for name in (None, "", "two words", "a,b", "a=b", 3)),
        *(({"aliases": aliases}, "alias") for aliases in ("rw", 3, ("a b",), (None,))),
        *(
            ({"api": api}, f"declares api = {api!r}; this shardwright supports api = 1")
            for api in (0, 2, "1", True, None)
        ),
    ],
    ids=str,
)
def test_make_entry_unusable_attributes_are_refused(sharding_type, attributes, text):
    with pytest.raises(PluginLoadError, match=text):
        entry(sharding_type(**{"name": "rows", **attributes}))


WORDS = st.sampled_from(["a", "b", "c", "d"])


@given(
    offers=st.lists(
        st.tuples(WORDS, st.sets(WORDS, max_size=2), st.sampled_from([ONE, TWO])), min_size=1, max_size=6
    ),
    preferred=st.dictionaries(WORDS, st.sampled_from(["acme-one", "acme-two"]), max_size=2),
    data=st.data(),
)
def test_registry_outcome_does_not_depend_on_order(offers, preferred, data):
    items = [
        Entry(name, object(), origin, tuple(sorted(aliases - {name}))) for name, aliases, origin in offers
    ]
    shuffled = data.draw(st.permutations(items))

    def outcome(entries):
        registry = Registry(KIND, entries, preferred=preferred)
        found = {}
        for word in "abcd":
            try:
                found[word] = id(registry[word])
            except ShardwrightError as error:
                found[word] = type(error)
        return registry.names, sorted(registry.conflicts), found

    assert outcome(shuffled) == outcome(items)
