"""Maps of ids under TorchRec's names: TorchRec's own rows, and sharded as unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright_torchrec.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from shardwright_torchrec.modules.managed_collisions.embedding import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollection,
    McEmbeddingBagCollectionAdapter,
    McEmbeddingCollectionAdapter,
)
from shardwright_torchrec.modules.managed_collisions.maps import (
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    apply_mc_method_to_jt_dict,
)
from shardwright_torchrec.modules.managed_collisions.policies import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder

import shardwright as sw

CPU, ROWS = torch.device("cpu"), 12
# Rows of ids after 12 steps of 9 ids, an update each second step, of TorchRec 1.8.0; other ids have row 11.
THEIRS: list[tuple[MCHEvictionPolicy, dict[int, int]]] = [
    (
        LFU_EvictionPolicy(),
        {0: 0, 7: 2, 14: 8, 21: 3, 28: 9, 35: 1, 42: 4, 84: 5, 168: 6, 189: 7, 357: 10},
    ),
    (
        LRU_EvictionPolicy(decay_exponent=0.5),
        {0: 0, 7: 6, 14: 4, 21: 9, 70: 10, 77: 1, 84: 2, 112: 8, 126: 5, 147: 7, 196: 3},
    ),
    (
        DistanceLFU_EvictionPolicy(),
        {0: 0, 7: 6, 14: 9, 21: 2, 56: 8, 70: 1, 77: 10, 84: 4, 91: 7, 112: 3, 147: 5},
    ),
    (
        DistanceLFU_EvictionPolicy(decay_exponent=2.0),
        {0: 0, 7: 6, 14: 2, 21: 8, 70: 9, 77: 4, 84: 1, 112: 7, 126: 10, 147: 5, 196: 3},
    ),
    (
        LFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter),
        {0: 9, 7: 8, 14: 4, 21: 6, 28: 7, 35: 10, 84: 5},
    ),
    (
        DistanceLFU_EvictionPolicy(threshold_filtering_func=lambda c: dynamic_threshold_filter(c, 1.5)),
        {0: 10, 7: 7, 21: 8, 28: 9},
    ),
]


def ids(values: torch.Tensor) -> dict[str, sw.JaggedTensor]:
    return {"t": sw.JaggedTensor(values=values, lengths=torch.tensor([len(values)]))}


def rows(module: torch.nn.Module, values: list[int]) -> list[int]:
    """Rows of ids, without counting them."""
    was_training = module.training
    found = module.eval()(ids(torch.tensor(values)))["t"].values().tolist()
    module.train(was_training)
    return found  # type: ignore[no-any-return]


def trained(policy: MCHEvictionPolicy) -> MCHManagedCollisionModule:
    module = MCHManagedCollisionModule(ROWS, CPU, policy, eviction_interval=2)
    generator = torch.Generator().manual_seed(3)
    for _ in range(12):
        module(ids((torch.rand(9, generator=generator) ** 3 * 60).long() * 7))
    return module


@pytest.mark.parametrize(("policy", "expected"), THEIRS, ids=range(len(THEIRS)))
def test_ids_get_the_rows_that_torchrec_gives_them(
    policy: MCHEvictionPolicy, expected: dict[int, int]
) -> None:
    module = trained(policy)
    everything = list(range(0, 420, 7))
    assert rows(module, everything) == [expected.get(one, ROWS - 1) for one in everything]
    assert int(module.open_slots()) == ROWS - 1 - len(expected)
    assert (module.output_size(), module.input_size(), module.buckets()) == (ROWS, 2**63 - 1, 1)


class Fading(MCHEvictionPolicy):
    """A stranger's policy: a use counts half as much two steps later."""

    def scores(self, counts: torch.Tensor, last_access: torch.Tensor, step: int) -> torch.Tensor:
        return counts * 2.0 ** ((last_access - step) / 2)


def test_policy_of_a_stranger_says_which_ids_have_rows() -> None:
    module, generator = MCHManagedCollisionModule(ROWS, CPU, Fading(), 2), torch.Generator().manual_seed(3)
    known: dict[int, tuple[int, int]] = {}  # uses and last use of the ids that have rows
    evicted = set[int]()
    for step in range(1, 21, 2):
        seen: dict[int, tuple[int, int]] = {}
        for now in (step, step + 1):
            own = (torch.rand(9, generator=generator) ** 2 * 60).long() * 7
            module(ids(own))
            for one in own.tolist():
                seen[one] = (seen.get(one, (0, 0))[0] + 1, now)
        before = set(known)
        for one, (uses, last) in sorted(seen.items(), key=lambda item: -item[1][0]):
            known[one] = (known.get(one, (0, 0))[0] + uses, last)
        scores = {one: uses * 2 ** ((last - step - 1) / 2) for one, (uses, last) in known.items()}
        # Of equal scores those that had a row keep it, in the order of ids; then new ones, those used most first.
        order = sorted(
            known,
            key=lambda one: (-scores[one], one not in before, 0 if one in before else -known[one][0], one),
        )
        known = {one: known[one] for one in order[: ROWS - 1]}
        evicted |= before - set(known)
        everything = list(range(0, 420, 7))
        found = dict(zip(everything, rows(module, everything), strict=True))
        assert {one for one, row in found.items() if row != ROWS - 1} == set(known), step
    assert evicted


def test_saved_map_is_torchrecs() -> None:
    state = {
        name: value.tolist() for name, value in trained(DistanceLFU_EvictionPolicy()).state_dict().items()
    }
    assert state == {  # of TorchRec 1.8.0, without its parts of the map
        "_current_iter_tensor": [12],
        "_mch_counts": [33, 12, 3, 5, 2, 1, 1, 2, 2, 1, 1, 2**63 - 1],
        "_mch_last_access_iter": [12, 12, 12, 11, 10, 12, 11, 12, 9, 11, 12, 12],
        "_mch_remapped_ids_mapping": [0, 6, 9, 2, 8, 1, 10, 4, 7, 3, 5, 11],
        "_mch_sorted_raw_ids": [0, 7, 14, 21, 56, 70, 77, 84, 91, 112, 147, 2**63 - 1],
    }


def test_map_goes_on_from_where_it_was_saved_also_by_torchrec() -> None:
    module = trained(DistanceLFU_EvictionPolicy())
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    assert set(saved) == {
        *("_current_iter_tensor", "_mch_counts", "_mch_last_access_iter"),
        *("_mch_remapped_ids_mapping", "_mch_sorted_raw_ids"),
    }
    saved["_output_segments_tensor"] = torch.full((1025,), -1)  # which TorchRec has besides
    for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_counts", "_mch_last_access_iter"):
        saved[name] = saved[name].flip(0)  # sorted by parts, if it was sharded there
    again = MCHManagedCollisionModule(ROWS, CPU, DistanceLFU_EvictionPolicy(), eviction_interval=2)
    again.load_state_dict(saved)
    coming = torch.arange(0, 140, 7)
    for one in (module, again):
        one(ids(coming))
        one(ids(coming[:5]))
    assert rows(again, coming.tolist()) == rows(module, coming.tolist())


def test_rows_that_changed_their_id_are_told_once() -> None:
    module = MCHManagedCollisionModule(3, CPU, LRU_EvictionPolicy(), eviction_interval=1)
    assert module.evict() is None
    module(ids(torch.tensor([5, 6])))
    before = rows(module, [5, 6, 7])
    assert sorted(before) == [0, 1, 2]
    module.evict()
    module(ids(torch.tensor([6, 7])))
    (changed,) = module.evict().tolist()  # type: ignore[union-attr]
    assert changed == before[0] == rows(module, [7])[0]
    assert module.evict() is None


def test_hash_function_comes_first() -> None:
    module = MCHManagedCollisionModule(
        4, CPU, LFU_EvictionPolicy(), 1, input_hash_size=10, input_hash_func=torch.remainder
    )
    module(ids(torch.tensor([12, 2, 32])))
    assert rows(module, [2, 42, 3]) == [rows(module, [2])[0]] * 2 + [3]
    same = apply_mc_method_to_jt_dict(module, "preprocess", ids(torch.tensor([42])))
    assert same["t"].values().tolist() == [2]


def test_probabilistic_filter_chooses_ids_by_their_uses() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([1] * 500 + [300] * 500)
    mask, _ = probabilistic_threshold_filter(counts)
    assert mask[:500].float().mean() < 0.05
    assert mask[500:].float().mean() > 0.9


def bag(name: str = "a", features: list[str] | None = None, count: int = ROWS) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=count, embedding_dim=8, feature_names=features or [f"f_{name}"]
    )


def a_map(count: int = ROWS) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(count, CPU, LFU_EvictionPolicy(), eviction_interval=1)


@pytest.mark.parametrize(
    ("maps", "tables", "said"),
    [
        ({}, [bag()], r"table 'a' has no map"),
        ({"a": 5}, [bag()], r"'a' has 12 rows, its map gives 5: give the map zch_size=12"),
        ({"a": ROWS, "b": ROWS}, [bag("a", ["f"]), bag("b", ["f"])], r"'f' belongs to tables 'a' and 'b'"),
    ],
)
def test_maps_that_do_not_fit_their_tables_are_refused(
    maps: dict[str, int], tables: list[Any], said: str
) -> None:
    with pytest.raises(sw.InvalidInputError, match=said):
        ManagedCollisionCollection({name: a_map(count) for name, count in maps.items()}, tables)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(sw.InvalidInputError, match="got 0 and 1"):
        a_map(0)
    with pytest.raises(sw.UnsupportedError, match="mch_size"):
        MCHManagedCollisionModule(4, CPU, LFU_EvictionPolicy(), 1, mch_size=2)
    maps = ManagedCollisionCollection({"b": a_map()}, [bag("b")])
    rows_of_a = sw.EmbeddingCollection([EmbeddingConfig(ROWS, 8, "a", feature_names=["f"])])
    with pytest.raises(sw.InvalidInputError, match=r"tables \['a'\], the maps are of \['b'\]"):
        ManagedCollisionEmbeddingCollection(rows_of_a, maps)
    with pytest.raises(sw.UnsupportedError, match="'mpzch' is not supported"):
        McEmbeddingBagCollectionAdapter([bag()], 100, CPU, 1, zch_method="mpzch")


def test_collection_maps_each_feature_by_its_table_and_leaves_others() -> None:
    tables = [bag("a", ["x", "z"]), bag("b", ["y"])]
    maps = ManagedCollisionCollection({"a": a_map(), "b": a_map()}, tables)
    features = sw.KeyedJaggedTensor(
        keys=["x", "y", "other", "z"],
        values=torch.tensor([70, 80, 80, 5, 70, 90]),
        lengths=torch.tensor([2, 0, 1, 0, 1, 0, 1, 1]),
        weights=torch.rand(6),
    )
    found = maps(features)
    (x70, x80), (y80,), (other,), (z70, z90) = (found[key].values().tolist() for key in found.keys())  # noqa: SIM118
    assert (x70, other) == (z70, 5)
    assert len({x70, x80, z90} - {ROWS - 1}) == 3
    assert y80 == rows(maps.get_submodule("_managed_collision_modules.b"), [80])[0] != ROWS - 1
    assert torch.equal(found.weights(), features.weights())
    assert torch.equal(found.lengths(), features.lengths())
    assert maps.table_to_number_buckets() == {"a": 1, "b": 1}
    assert {name: int(count) for name, count in maps.open_slots().items()} == {"a": 8, "b": 10}


def test_sequence_collection_and_adapters() -> None:
    table = EmbeddingConfig(ROWS, 8, "a", feature_names=["f"])
    adapter = McEmbeddingCollectionAdapter([table], 10**9, CPU, 1, zch_method="sort_zch")
    adapter.mc_embedding_collection._embedding_module.to_empty(device="cpu").reset_parameters()
    features = sw.KeyedJaggedTensor(keys=["f"], values=torch.tensor([10**8, 7]), lengths=torch.tensor([1, 1]))
    found = adapter(features)["f"].values()
    weight = adapter.mc_embedding_collection._embedding_collection.embeddings["a"].weight
    assert torch.equal(found, weight[adapter.remapped_ids.values()])
    assert [one.name for one in adapter.embedding_configs()] == ["a"]
    bags = McEmbeddingBagCollectionAdapter([bag()], 100, CPU, 1, zch_method="sort_zch")
    assert [one.name for one in bags.embedding_bag_configs()] == ["a"]


def test_sharder_takes_the_settings_of_the_one_within() -> None:
    settings = {"learning_rate": 0.25}
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(settings))
    assert sharder.fused_params == EmbeddingBagCollectionSharder(settings).fused_params
    assert sharder.module_type is sw.EmbeddingBagCollection
