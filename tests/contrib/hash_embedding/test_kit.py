"""hash_table and hash_rows keep what every kernel and every sharding type must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
import shardwright_serving as serving
import torch
from shardwright_hash_embedding import (
    HashedIds,
    HashRows,
    HashSettings,
    HashTable,
    HashTableNumba,
    numba_search,
)
from shardwright_hash_embedding.index import HashIndex
from shardwright_serving import KnownIds, with_zero_row
from tests.contrib.hash_embedding.test_hash_embedding import DIM, KEYS, USES, WEIGHT, Setup, batch, train
from tests.plugins.conformance.mistakes.test_mutants import assert_fails_the_kit
from torch import nn

import shardwright as sw
from shardwright_testing import ComputeKernelTests, RowIndexTests, ShardingTypeTests
from shardwright_testing.kernels.kernel_checks import check_memory
from shardwright_testing.kernels.kernel_groups import spec_of
from shardwright_testing.kernels.loops import block_spec

pytestmark = pytest.mark.usefixtures("plugins")


class TestHashTable(ComputeKernelTests):
    extras = HashSettings(min_sightings=2).to_extras()

    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return HashTable()


class TestHashTableOfCounts(TestHashTable):
    extras = HashSettings(min_sightings=2, count_column="count").to_extras()


class TestHashTableNumba(TestHashTable):
    @pytest.fixture
    def compute_kernel(self) -> sw.ComputeKernel:
        return HashTableNumba()


@pytest.mark.parametrize(
    "rules", [HashSettings(), HashSettings("lfu"), HashSettings(min_sightings=3)], ids=str
)
class TestHashIndex(RowIndexTests):
    @pytest.fixture
    def make_index(self, rules: HashSettings) -> Callable[[int], sw.RowIndex]:
        return lambda num_rows: HashIndex(num_rows, rules, numba_search)


@pytest.mark.parametrize("sightings", [1, 2])
def test_declared_memory_is_that_of_the_settings(sightings: int) -> None:
    rules = HashSettings(min_sightings=sightings)
    blocks = [block_spec(3000, optimizer=spec_of("sgd"), takes_any_id=True, extras=rules.to_extras())]
    check_memory(f"min_sightings={sightings}", HashTable(), blocks)


@pytest.mark.slow
class TestHashRows(ShardingTypeTests):
    constraints = HashSettings().constraints()

    @pytest.fixture
    def sharding_type(self) -> sw.ShardingType:
        return HashRows()


@attrs.frozen
class CutKeys(HashedIds):
    """The kernel gets less than the key."""

    name = "cut_keys"

    def local_row_of(self, ids: Any) -> Any:
        return ids // self.parts


class CutsKeys(HashRows):
    name, abbreviation, row_maps = "cuts_keys", "CUT", (CutKeys,)

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Iterator[sw.Layout]:
        rows = CutKeys(table.num_embeddings, parts=topology.world_size)
        yield sw.Layout([sw.BlockRun(rows, table.all_columns, rows.num_parts, rank=0)])


class Changed(HashTable):
    """Builds a lookup one of whose methods is another."""

    method: str

    def build(self, blocks: Any, *, device: Any) -> Any:
        lookup = super().build(blocks, device=device)
        right = getattr(lookup, self.method)
        setattr(lookup, self.method, lambda *given, **named: self.changed(right, *given, **named))
        return lookup

    def changed(self, right: Any, *given: Any, **named: Any) -> Any:
        raise NotImplementedError


class BearsWhenServing(Changed):
    name, method = "bears_when_serving", "forward"

    def changed(self, right: Any, bags: Any, *, training: bool) -> Any:
        return right(bags, training=True)


class ForgetsKeys(Changed):
    name, method = "forgets_keys", "row_index"

    def changed(self, right: Any, block: int) -> Any:
        index = right(block)
        return Mock(wraps=index, load=lambda state: index.load(state) * 0 - 1)


@pytest.mark.parametrize(
    ("mutant", "kit", "test", "message"),
    [
        (
            CutsKeys,
            "ShardingTypeTests",
            "test_row_maps_are_bijections_onto_their_parts",
            r"local_row_of gives -?\d+ for the key -?\d+; the kernel needs the key itself",
        ),
        (
            BearsWhenServing,
            "ComputeKernelTests",
            "test_key_without_a_row_brings_zeros_and_gets_none_without_training",
            r"keys that were never trained: bring \[.*\], they must bring zeros",
        ),
        (
            ForgetsKeys,
            "ComputeKernelTests",
            "test_optimizer_state_is_of_the_rows_and_continues_in_another_lookup",
            r"load\(\) takes over rows \[-1, .*\] of the \d that state\(\) has",
        ),
    ],
)
def test_kernel_or_row_map_that_loses_keys_fails_the_kit(
    mutant: Any, kit: str, test: str, message: str
) -> None:
    assert_fails_the_kit(mutant, kit, test, message)


class Bags(nn.Module):
    """A collection and the values of its outputs."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        return self.rows(features).values()


def test_tables_of_keys_are_exported_with_their_keys_alone(tmp_path: Path) -> None:
    setup, env = Setup(), sw.ShardingEnv.local(device_type="cpu")
    sharded = setup.shard(env, setup.plan(1))
    train(setup, sharded, env, range(2))
    example = sw.KeyedJaggedTensor.from_lists({"a": [[1], []], "b": [[], [2]], "c": [[3], [4]]})
    options = {"precision": "FP16", "forms": ["torchscript"], "check": False}
    with pytest.raises(
        sw.UnsupportedError, match=r"table .*item.*: its ids are keys.*put shardwright_serving\.KnownIds"
    ):
        serving.export_for_inference(Bags(sharded), example, tmp_path / "package", **options)
    saved = sw.save_checkpoint(tmp_path / "saved", Bags(sharded))
    with pytest.raises(sw.UnsupportedError, match=r"item.weight': its ids are keys"):
        serving.export_for_inference(
            Bags(setup.module()), example, tmp_path / "package", checkpoint=saved.path, **options
        )
    state = sharded.full_state_dict()
    born = state[USES].flatten() > 0
    rows = serving.quantize_rows(state[WEIGHT][born], "FP16")
    table = sw.EmbeddingBagConfig(
        name="item",
        num_embeddings=rows.num_rows + 1,
        embedding_dim=DIM,
        feature_names=["a", "b"],
        data_type="FP16",
    )
    collection = serving.QuantEmbeddingBagCollection([table])
    collection.set_rows("item", with_zero_row(rows))
    served = Bags(KnownIds(collection, {"item": state[KEYS][born]}))
    path = serving.export_for_inference(served, example, tmp_path / "package", **options)
    seen = batch(5, 0, 1)
    with torch.no_grad():
        trained = sharded(seen)
    wanted = torch.cat([trained["a"], trained["b"]], dim=1)
    found = serving.load_package(path).predict(seen)["output"]
    assert wanted.any()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)  # of float16
