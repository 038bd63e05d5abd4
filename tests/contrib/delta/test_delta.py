"""A base and its increments are the model, bit for bit, under any plan; increments have the rows that changed alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import shardwright_delta as delta
import shardwright_hash_embedding
import torch
from shardwright_delta.digests import digests
from tests import readme
from tests.contrib.hash_embedding import test_hash_embedding as hashed
from tests.plugins.resharding.one_collection import reshard_collection

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_testing import run_simulated

ROWS, DIM = 40, 8


@pytest.fixture(autouse=True)
def plugins() -> Iterator[PluginHost]:
    with use_host(PluginHost(plugins={"hash_embedding": shardwright_hash_embedding})) as own:
        yield own


def model_of(
    kind: str, world_size: int, optimizer: str, data_type: str = "FP32", update: str = "in_backward"
) -> Any:
    """A function of the rank's environment that shards a table of 40 rows and trains it by steps."""
    config = sw.EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"], data_type=data_type
    )
    sharder = sw.EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})
    module = sw.EmbeddingBagCollection([config])
    planner = sw.EmbeddingShardingPlanner(
        sw.Topology(world_size, "cpu"),
        batch_size=4,
        constraints={"t": sw.ParameterConstraints(sharding_types=[kind], min_partition=4)},
    )
    plan = planner.plan_tables(sharder.tables(module))
    return lambda env: sharder.shard(module, plan.plan[""], env, "cpu")


def step(sharded: Any, env: sw.ShardingEnv, *rows: int) -> None:
    """Train rows, on each rank those of its number and so on."""
    own = torch.tensor(rows[env.rank :: env.world_size], dtype=torch.int64)
    features = sw.KeyedJaggedTensor(keys=["f"], values=own, lengths=torch.ones(len(own), dtype=torch.int32))
    sharded(features).values().sin().sum().backward()


def whole(sharded: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(
        (found[0], found[1]["state"]), (wanted[0], wanted[1]["state"]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adam", "sgd"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("row_wise", 2), ("column_wise", 2)),
        (("column_wise", 2), ("row_wise", 3)),
        (("table_wise", 2), ("data_parallel", 2)),
        (("data_parallel", 2), ("table_wise", 1)),
    ],
    ids=str,
)
def test_base_and_increments_are_the_model_bit_for_bit_under_another_plan(
    before: tuple[str, int], after: tuple[str, int], optimizer: str, tmp_path: Path
) -> None:
    make, other = model_of(*before, optimizer), model_of(*after, optimizer)

    def train(env: sw.ShardingEnv) -> Any:
        sharded = make(env)
        step(sharded, env, *range(20))
        base, changes = whole(sharded), delta.Changes(sharded)
        for number, rows in enumerate([(1, 2, 3, 3), (3, 30), (1, 39)]):
            step(sharded, env, *rows)
            delta.write_increment(tmp_path / str(number), changes.take(), rank=env.rank)
        assert changes.take() == []
        return base, whole(sharded)

    (model, states), wanted = run_simulated(train, before[1])[0]
    for number, rows in enumerate([{1, 2, 3}, {3, 30}, {1, 39}]):
        assert {
            row for batch in delta.read_increment(tmp_path / str(number)) for row in batch["id"].to_pylist()
        } == rows

    def load(env: sw.ShardingEnv) -> Any:
        sharded = other(env)
        sharded.load_state_dict(model)
        sharded.fused_optimizer.load_state_dict(states)
        for number in range(3):
            delta.replay(sharded, delta.read_increment(tmp_path / str(number)))
        return whole(sharded)

    for found in run_simulated(load, after[1]):
        assert_same(found, wanted)


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise"])
def test_held_blocks_of_all_ranks_are_the_table_and_its_states(sharding_type: str) -> None:
    make = model_of(sharding_type, 2, "adam")

    def work(env: sw.ShardingEnv) -> Any:
        sharded = make(env)
        step(sharded, env, 1, 7)
        return [*delta.held_blocks(sharded)], whole(sharded)

    (mine, (state, optimizer)), (theirs, _) = run_simulated(work, 2)
    weight = state["embedding_bags.t.weight"]
    found = {name: torch.full_like(weight, torch.nan) for name in ("weight", "optimizer.exp_avg")}
    for held in (*mine, *theirs):
        rows, ids = held.rows_and_ids()
        columns = slice(held.block.columns.start, held.block.columns.stop)
        for name, value in found.items():
            value[torch.from_numpy(ids), columns] = held.values()[name][rows]
    assert {held.path for held in (*mine, *theirs)} == {"t"}
    (states,) = optimizer["state"].values()
    assert torch.equal(found["weight"], weight)
    assert torch.equal(found["optimizer.exp_avg"], states["exp_avg"])


@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
def test_increment_of_halves_has_their_bits(data_type: str) -> None:
    make = model_of("row_wise", 1, "row_wise_adagrad", data_type)

    def work(env: sw.ShardingEnv) -> None:
        trained, kept = make(env), make(env)
        kept.load_state_dict(trained.state_dict())
        changes = delta.Changes(trained)
        step(trained, env, 1, 7)
        assert not torch.equal(*(own.full_state_dict()["embedding_bags.t.weight"] for own in (trained, kept)))
        delta.replay(kept, changes.take())
        assert_same(whole(kept), whole(trained))

    run_simulated(work, 1)


@pytest.mark.parametrize("other", [1, 3])
def test_keys_that_are_born_and_evicted_are_replayed_on_another_number_of_ranks(other: int) -> None:
    # 16 rows for 30 keys on two ranks: each step evicts.
    setup = hashed.Setup(capacity=16, optimizer="adam")
    larger = hashed.Setup(capacity=90, optimizer="adam")  # a rank may get more of the keys than another
    plan, moved = setup.plan(2), larger.plan(other)

    def train(env: sw.ShardingEnv) -> Any:
        sharded = setup.shard(env, plan)
        changes, increments = delta.Changes(sharded), []
        for number in range(4):
            hashed.train(setup, sharded, env, [number])
            increments.append(changes.take())
        return increments, whole(sharded)

    results = run_simulated(train, 2)
    increments = [[batch for own, _ in results for batch in own[number]] for number in range(4)]
    assert any(batch.schema.names == ["id"] for own in increments for batch in own)  # evicted

    def load(env: sw.ShardingEnv) -> Any:
        sharded = larger.shard(env, moved)
        for own in increments:
            delta.replay(sharded, own)
        return whole(sharded)

    wanted, (found, *_) = results[0][1], run_simulated(load, other)
    assert_same_keys(found, wanted)


def assert_same_keys(found: Any, wanted: Any) -> None:
    """Rows, and what is known of each key, are the same, wherever they are."""
    for name, values in (
        *((name, None) for name in wanted[0] if ".item." in name),
        *wanted[1]["state"][hashed.WEIGHT].items(),
    ):
        if name == "step":
            assert found[1]["state"][hashed.WEIGHT][name] == values
            continue
        mine, theirs = (
            state[name] if values is None else states["state"][hashed.WEIGHT][name]
            for state, states in (found, wanted)
        )
        assert hashed.rows_by_key(found[0], mine) == hashed.rows_by_key(wanted[0], theirs)


@pytest.mark.parametrize("other", [1, 3])
def test_every_row_replayed_in_a_new_model_makes_it_the_old_one(other: int, tmp_path: Path) -> None:
    make, anew = model_of("row_wise", 2, "adam"), model_of("column_wise", other, "adam")
    keyed = hashed.Setup(capacity=90, optimizer="adam")
    plans = keyed.plan(2), keyed.plan(other)

    def save(env: sw.ShardingEnv) -> Any:
        models = make(env), keyed.shard(env, plans[0])
        step(models[0], env, *range(0, 30, 2))
        hashed.train(keyed, models[1], env, range(3))
        for number, model in enumerate(models):
            delta.write_increment(tmp_path / str(number), delta.every_row(model), rank=env.rank)
        return [whole(model) for model in models]

    def load(env: sw.ShardingEnv) -> Any:
        models = anew(env), keyed.shard(env, plans[1])
        for number, model in enumerate(models):
            delta.replay(model, delta.read_increment(tmp_path / str(number)))
        return [whole(model) for model in models]

    rows, keys = run_simulated(save, 2)[0]
    for found_rows, found_keys in run_simulated(load, other):
        assert_same(found_rows, rows)
        assert_same_keys(found_keys, keys)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_increment_after_a_reshard_is_refused_on_ranks_with_and_without_blocks(kind: str) -> None:
    make, plan = model_of(kind, 3, "sgd"), {}

    def work(env: sw.ShardingEnv) -> None:
        sharded = make(env)
        changes = delta.Changes(sharded)
        own = sharded.inputs.params["t"]
        moved = own.layout.placed((block.rank + 1) % 3 for block in own.layout.blocks)
        plan["t"] = own.__class__(own.sharding_type, own.compute_kernel, moved)
        reshard_collection(sharded, plan)
        with pytest.raises(sw.UnsupportedError, match="resharded since the mark"):
            changes.take()
        changes.mark()
        assert changes.take() == []

    run_simulated(work, 3)


def test_increment_of_another_table_or_optimizer_is_refused() -> None:
    def work(env: sw.ShardingEnv) -> None:
        trained, other = (model_of("row_wise", 1, name)(env) for name in ("sgd", "adam"))
        changes = delta.Changes(trained)
        step(trained, env, 1)
        (batch,) = changes.take()
        with pytest.raises(sw.InvalidInputError, match="with the same optimizer"):
            delta.replay(other, [batch])
        data = batch.schema.metadata[b"shardwright.delta"].replace(b'"t"', b'"u"')
        renamed = batch.replace_schema_metadata({b"shardwright.delta": data})
        with pytest.raises(sw.InvalidInputError, match="the increment has table 'u'"):
            delta.replay(trained, [renamed])

    run_simulated(work, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_digest_is_the_sum_of_words_times_drawn_numbers(dtype: torch.dtype) -> None:
    values = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 15, (5, 3))).to(dtype)
    octets = np.zeros((5, -(-values.itemsize * 3 // 4) * 4), dtype=np.uint8)
    octets[:, : 3 * values.itemsize] = values.view(torch.uint8).numpy()
    words = octets.view(np.int32)
    drawn = np.random.default_rng(0).integers(
        -(1 << 63), (1 << 63) - 1, size=(words.shape[1], 2), endpoint=True
    )
    wanted = [
        [sum(int(a) * int(b) for a, b in zip(row, lane, strict=True)) % 2**64 for lane in drawn.T]
        for row in words
    ]
    assert digests([values]).view(np.uint64).tolist() == wanted


def test_digests_of_more_rows_than_are_hashed_at_once_are_those_of_each() -> None:
    many = torch.zeros(300_000, 2)
    many[-1] = 1
    assert (digests([many]) != digests([many[:1]])).any(axis=1).nonzero()[0].tolist() == [299_999]


def test_increments_are_arrow_files_that_others_read(tmp_path: Path) -> None:
    def work(env: sw.ShardingEnv) -> None:
        sharded = model_of("row_wise", 1, "row_wise_adagrad")(env)
        changes = delta.Changes(sharded)
        step(sharded, env, 5, 7)
        delta.write_increment(tmp_path, changes.take())
        (path,) = tmp_path.iterdir()
        table = pa.ipc.open_file(path).read_all()
        assert table.schema.names == ["id", "weight", "optimizer.sum"]
        weight = sharded.full_state_dict()["embedding_bags.t.weight"]
        assert table["id"].to_pylist() == [5, 7]
        assert table["weight"].to_pylist() == weight[[5, 7]].tolist()

    run_simulated(work, 1)


def test_increment_that_is_written_again_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    def work(env: sw.ShardingEnv) -> None:
        sharded = model_of("row_wise", 1, "row_wise_adagrad")(env)
        changes = delta.Changes(sharded)
        step(sharded, env, 5)
        (batch,) = changes.take()
        delta.write_increment(str(tmp_path), [batch, batch])
        delta.write_increment(tmp_path, [batch], rank=1)
        delta.write_increment(tmp_path, [batch])
        assert [own.equals(batch) for own in delta.read_increment(str(tmp_path))] == [True] * 2
        delta.write_increment(tmp_path, [])
        assert len(list(delta.read_increment(tmp_path))) == 1

    run_simulated(work, 1)


@pytest.mark.parametrize(
    "ask", [delta.Changes, delta.every_row, delta.held_blocks, lambda model: delta.replay(model, [])]
)
def test_model_that_is_not_sharded_has_no_changes(ask: Callable[[Any], Any]) -> None:
    bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
    with pytest.raises(sw.InvalidInputError, match="EmbeddingBagCollection has no sharded collection"):
        ask(bags)
    with pytest.raises(sw.InvalidInputError, match="NoneType has no sharded collection"):
        ask(None)


@pytest.mark.parametrize("batch", [pa.record_batch({"id": [1]}), 5])
def test_batch_without_its_metadata_is_refused(batch: Any) -> None:
    with pytest.raises(sw.InvalidInputError, match=r"'shardwright.delta' in the metadata .* got .* without"):
        run_simulated(lambda env: delta.replay(model_of("table_wise", 1, "sgd")(env), [batch]), 1)


def test_folder_that_is_none_of_an_increment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.InvalidInputError, match="no folder of an increment"):
        list(delta.read_increment(tmp_path / "increment"))
    (tmp_path / "00000-00000.arrow").write_bytes(b"ARROW1" * 9)
    with pytest.raises(sw.InvalidInputError, match=r"00000-00000.arrow is no file of an increment"):
        list(delta.read_increment(tmp_path))


@pytest.mark.parametrize("row", [-1, ROWS])
def test_row_that_the_table_has_not_is_refused_and_nothing_is_changed(row: int) -> None:
    def work(env: sw.ShardingEnv) -> None:
        sharded = model_of("table_wise", 1, "row_wise_adagrad")(env)
        changes = delta.Changes(sharded)
        step(sharded, env, 5)
        before, (batch,) = whole(sharded), changes.take()
        wrong = batch.set_column(0, "id", pa.array([row])).replace_schema_metadata(batch.schema.metadata)
        step(sharded, env, 5)
        now = whole(sharded)
        with pytest.raises(sw.InvalidInputError, match=f"row {row} of table 't'"):
            delta.replay(sharded, [batch, wrong])
        assert_same(whole(sharded), now)
        delta.replay(sharded, [batch])
        assert_same(whole(sharded), before)

    run_simulated(work, 1)


def test_example_of_the_readme_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    page = Path(delta.__file__).parent.parent / "README.md"
    monkeypatch.chdir(tmp_path)
    readme.check_output("train_and_follow.py", page, tmp_path, capsys)
