"""Which sharder serves which module, and how collections are found in a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from shardwright.optim import apply_optimizer_in_backward
from shardwright.planning.tables.optimizers import ASSUMED, OptimizerSpec
from shardwright.planning.tables.spec import EmbeddingBagConfig, EmbeddingConfig
from shardwright.runtime.sharded.collections import sharded_module
from shardwright.runtime.sharded.collections.sharders import (
    EmbeddingBagCollectionSharder,
    ModuleSharder,
    collect_tables,
    default_sharders,
    find_sharder,
    register_sharder,
    shardable_modules,
)


class Tower(nn.Module):
    pass


class TallTower(Tower):
    pass


def sharder_for(kind):
    class Sharder(ModuleSharder):
        module_type = kind

        def tables(self, module, path=""):
            return []

        def shard(self, module, params, env, device=None, module_fqn=None):
            return module

    return Sharder


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(sharded_module, "_SHARDERS", {})
    return register_sharder


def bags(*names):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(4, 2, name=name, feature_names=[f"f_{name}"], pooling="SUM")
            for name in names or ("t",)
        ],
        device="meta",
    )


def test_find_sharder_goes_along_the_mro_and_takes_the_nearest(registry):
    class TallestTower(TallTower):
        pass

    wide, near = sharder_for(Tower)(), sharder_for(TallTower)()
    for sharders in ([wide, near], [near, wide]):
        assert find_sharder(Tower(), sharders) is wide
        assert find_sharder(TallTower(), sharders) is near
        assert find_sharder(TallestTower(), sharders) is near
        assert find_sharder(nn.Linear(1, 1), sharders) is None


def test_register_sharder_makes_it_a_default_and_twice_is_nothing(registry):
    sharder = sharder_for(Tower)
    assert registry(sharder) is sharder
    registry(sharder)
    assert [type(item) for item in default_sharders()] == [sharder]


def test_register_sharder_for_a_class_that_has_one_raises_naming_both(registry):
    registry(sharder_for(Tower))
    with pytest.raises(InvalidInputError, match=r"Tower has a sharder already: .*test_sharders.*Sharder"):
        registry(sharder_for(Tower))


def test_default_sharders_serve_the_collection_that_can_be_sharded():
    assert EmbeddingBagCollectionSharder in [type(item) for item in default_sharders()]


def test_shardable_modules_finds_nested_ones_with_their_paths():
    model = nn.ModuleDict({"left": nn.Sequential(nn.Linear(1, 1), bags()), "right": bags()})
    sharders = default_sharders()
    found = list(shardable_modules(model, sharders))
    assert [path for path, *_ in found] == ["left.1", "right"]
    assert [path for path, *_ in shardable_modules(bags(), sharders)] == [""]


def test_shardable_modules_does_not_look_inside_one_it_found(registry):
    class Outer(Tower):
        def __init__(self):
            super().__init__()
            self.inner = bags()
            self.inner_ = Tower()

    model = nn.ModuleDict({"a": Outer(), "ab": bags()})
    sharders = [sharder_for(Tower)(), EmbeddingBagCollectionSharder()]
    assert [path for path, *_ in shardable_modules(model, sharders)] == ["a", "ab"]
    assert [path for path, *_ in shardable_modules(Outer(), sharders)] == [""]


def test_shardable_modules_subclass_of_a_collection_is_served_by_its_sharder():
    class MyBags(EmbeddingBagCollection):
        pass

    model = MyBags([EmbeddingBagConfig(4, 2, name="t", feature_names=["f"])], device="meta")
    ((path, child, sharder),) = shardable_modules(model, default_sharders())
    assert (path, child, type(sharder)) == ("", model, EmbeddingBagCollectionSharder)


@pytest.mark.parametrize(
    ("wrap", "where"), [(lambda m: nn.Sequential(m), "'0'"), (lambda m: m, "'the root of the model'")]
)
def test_shardable_modules_collection_that_nobody_serves_raises_with_path_and_class(wrap, where):
    collection = EmbeddingCollection([EmbeddingConfig(4, 2, name="t", feature_names=["f"])], device="meta")
    with pytest.raises(
        UnsupportedError, match=f"no sharder for EmbeddingCollection at {where}.*EmbeddingBagCollection"
    ):
        list(shardable_modules(wrap(collection), [EmbeddingBagCollectionSharder()]))


def test_collect_tables_has_path_and_optimizer_of_each():
    model = nn.ModuleDict({"a": bags("x", "y"), "b": bags("x")})
    tables = collect_tables(
        model, [EmbeddingBagCollectionSharder({"optimizer": "adam", "learning_rate": 0.3})]
    )
    assert [table.path for table in tables] == ["a.x", "a.y", "b.x"]
    assert {table.optimizer for table in tables} == {OptimizerSpec("adam", 0.3)}
    assert [table.optimizer for table in collect_tables(bags())] == [ASSUMED]


def test_tables_optimizer_applied_in_backward_wins_over_fused_params_table_by_table():
    collection = bags("x", "y")
    apply_optimizer_in_backward(torch.optim.Adagrad, [collection.embedding_bags["y"].weight], {"lr": 0.2})
    specs = EmbeddingBagCollectionSharder({"optimizer": "sgd", "learning_rate": 0.3}).tables(collection)
    assert [(spec.optimizer.name, spec.optimizer.learning_rate) for spec in specs] == [
        ("sgd", 0.3),
        ("adagrad", 0.2),
    ]
