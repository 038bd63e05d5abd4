"""Which sharder serves which module, and how collections are found in a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Extension,
    InvalidInputError,
    LeaveAlone,
    ModuleSharder,
    PluginLoadError,
    UnsupportedError,
    apply_optimizer_in_backward,
    hookimpl,
)
from shardwright.host.plugin_host import PluginHost, use_host
from shardwright.optim import fused
from shardwright.runtime.sharded.collections.sharders import (
    collect_tables,
    default_sharders,
    find_sharder,
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


def offering(*makers):
    """A host where a plugin offers sharders, each a function that makes one."""

    def extension(index, maker):
        class Offered(Extension):
            name = f"sharder:word_{index}"

            def load(self):
                return maker

        return Offered()

    class Plugin:
        @hookimpl
        def shardwright_extensions(self):
            return [extension(*each) for each in enumerate(makers)]

    return use_host(PluginHost(entry_points=[], plugins={"offering": Plugin()}, environment={}))


def bags(*names):
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(4, 2, name=name, feature_names=[f"f_{name}"], pooling="SUM")
            for name in names or ("t",)
        ],
        device="meta",
    )


def test_find_sharder_goes_along_the_mro_and_takes_the_nearest():
    class TallestTower(TallTower):
        pass

    wide, near = sharder_for(Tower)(), sharder_for(TallTower)()
    for sharders in ([wide, near], [near, wide]):
        assert find_sharder(Tower(), sharders) is wide
        assert find_sharder(TallTower(), sharders) is near
        assert find_sharder(TallestTower(), sharders) is near
        assert find_sharder(nn.Linear(1, 1), sharders) is None


def test_default_sharders_have_what_plugins_offer_beside_those_of_core():
    sharder = sharder_for(Tower)
    with offering(sharder):
        found = default_sharders()
    assert [type(each).__name__ for each in found[:2]] == [
        "EmbeddingBagCollectionSharder",
        "EmbeddingCollectionSharder",
    ]
    assert [type(each) for each in found[2:]] == [sharder]


def test_sharders_of_plugins_for_one_class_raise_naming_extension_and_class():
    with offering(sharder_for(Tower), sharder_for(Tower)), pytest.raises(PluginLoadError) as caught:
        default_sharders()
    assert all(word in str(caught.value) for word in ("sharder:word_1", "Tower", "test_sharders"))


def test_extension_that_makes_no_sharder_is_named():
    with offering(dict), pytest.raises(PluginLoadError, match="sharder:word_0"):
        default_sharders()


@pytest.mark.parametrize("by", ["module", "class"])
def test_modules_that_are_left_alone_are_not_found(by):
    class Own(EmbeddingBagCollection):
        pass

    left = Own([EmbeddingBagConfig(4, 2, name="x", feature_names=["f"])], device="meta")
    model = nn.ModuleDict({"left": left, "right": nn.Sequential(bags("y"))})
    sharders = [EmbeddingBagCollectionSharder(), LeaveAlone(left if by == "module" else Own)]
    assert [path for path, *_ in shardable_modules(model, sharders)] == ["right.0"]
    assert [table.path for table in collect_tables(model, sharders)] == ["right.0.y"]


def test_leave_alone_takes_modules_only():
    with pytest.raises(InvalidInputError):
        LeaveAlone("left")
    with pytest.raises(InvalidInputError):
        LeaveAlone(int)


def test_shardable_modules_does_not_look_inside_one_it_found():
    class Outer(Tower):
        def __init__(self):
            super().__init__()
            self.inner = bags()
            self.inner_ = Tower()

    model = nn.ModuleDict({"a": Outer(), "ab": bags()})
    sharders = [sharder_for(Tower)(), EmbeddingBagCollectionSharder()]
    assert [path for path, *_ in shardable_modules(model, sharders)] == ["a", "ab"]
    assert [path for path, *_ in shardable_modules(Outer(), sharders)] == [""]


@pytest.mark.parametrize(
    ("wrap", "where"), [(lambda m: nn.Sequential(m), "'0'"), (lambda m: m, "'the root of the model'")]
)
def test_shardable_modules_collection_that_nobody_serves_raises_with_path_and_class(wrap, where):
    collection = EmbeddingCollection([EmbeddingConfig(4, 2, name="t", feature_names=["f"])], device="meta")
    with pytest.raises(
        UnsupportedError, match=f"no sharder for EmbeddingCollection at {where}.*EmbeddingBagCollection"
    ):
        list(shardable_modules(wrap(collection), [EmbeddingBagCollectionSharder()]))


class Own(torch.optim.Adagrad):
    """An optimizer that a fused one stands for."""


def test_tables_optimizer_applied_in_backward_wins_over_fused_params_table_by_table(monkeypatch):
    monkeypatch.setattr(fused, "_REGISTERED", {})
    fused.register_fused_optimizer(Own, "own", lambda group: {"learning_rate": group["lr"]})
    collection = bags("x", "y")
    apply_optimizer_in_backward(Own, [collection.embedding_bags["y"].weight], {"lr": 0.2})
    specs = EmbeddingBagCollectionSharder({"optimizer": "sgd", "learning_rate": 0.3}).tables(collection)
    assert [(spec.optimizer.name, spec.optimizer.learning_rate) for spec in specs] == [
        ("sgd", 0.3),
        ("own", 0.2),
    ]
