"""Tables of any id train on any number of ranks as a dictionary of rows does, and their checkpoints move."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from attrs import field, frozen
from shardwright_hash_embedding import HashSettings
from shardwright_hash_embedding.hashing import HashedIds
from tests.contrib import distributions
from tests.pairs import in_turns
from tests.plugins.resharding.one_collection import reshard_collection

import shardwright as sw
from shardwright_plugins.compute_kernels.indexed_rows._lookup import first_values
from shardwright_testing import run_simulated

DIM, RATE = 4, 0.5
POOL = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, size=30)
WEIGHT, KEYS, USES = (f"embedding_bags.item.{name}" for name in ("weight", "row_keys", "row_uses"))


pytestmark = pytest.mark.usefixtures("plugins")


@frozen
class Setup:
    """One hashed table with two features, and one of rows beside it that shares a feature."""

    capacity: int = 60
    rules: HashSettings = field(factory=HashSettings)
    optimizer: str = "sgd"
    is_pooled: bool = True

    @property
    def sharder(self) -> Any:
        kind = sw.EmbeddingBagCollectionSharder if self.is_pooled else sw.EmbeddingCollectionSharder
        return kind(fused_params={"optimizer": self.optimizer, "learning_rate": RATE})

    def module(self) -> Any:
        sizes = {"item": (self.capacity, ["a", "b"]), "plain": (9, ["c"])}
        common = [
            {"name": name, "num_embeddings": rows, "embedding_dim": DIM, "feature_names": features}
            for name, (rows, features) in sizes.items()
        ]
        if self.is_pooled:
            bags = [sw.EmbeddingBagConfig(**config) for config in common]
            return sw.EmbeddingBagCollection(bags, device="meta")
        return sw.EmbeddingCollection([sw.EmbeddingConfig(**config) for config in common], device="meta")

    def plan(self, world_size: int, **topology: Any) -> sw.ShardingPlan:
        planner = sw.EmbeddingShardingPlanner(
            topology=sw.Topology(world_size=world_size, compute_device="cpu", **topology),
            constraints={
                "item": self.rules.constraints(pooling_factors=[3]),
                "plain": sw.ParameterConstraints(sharding_types=["row_wise"]),
            },
            batch_size=4,
        )
        return planner.plan_tables(self.sharder.tables(self.module()))

    def shard(self, env: sw.ShardingEnv, plan: sw.ShardingPlan) -> Any:
        return self.sharder.shard(self.module(), plan.plan[""], env, "cpu")


def batch(step: int, rank: int, world_size: int) -> sw.KeyedJaggedTensor:
    """This rank's part of 6 samples: the ids of `a` and `b` are keys, those of `c` rows."""
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 4, size=(3, 6))
    ids = [
        [POOL[rng.integers(30, size=count)] if feature < 2 else rng.integers(9, size=count) for count in own]
        for feature, own in enumerate(lengths)
    ]
    mine = range(rank * 6 // world_size, (rank + 1) * 6 // world_size)
    return sw.KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.from_numpy(
            np.concatenate([ids[f][sample] for f in range(3) for sample in mine]).astype(np.int64)
        ),
        lengths=torch.tensor([lengths[f][sample] for f in range(3) for sample in mine], dtype=torch.int32),
    )


def hashed_columns(setup: Setup, result: Any) -> list[torch.Tensor]:
    """The outputs of `a` and `b`."""
    if setup.is_pooled:
        return [result["a"], result["b"]]
    return [result["a"].values(), result["b"].values()]


def train(setup: Setup, sharded: Any, env: sw.ShardingEnv, steps: Sequence[int]) -> list[list[torch.Tensor]]:
    """Outputs of each step; gradients are such that the mean over ranks is that of one rank with all samples."""
    outputs = []
    for step in steps:
        columns = hashed_columns(setup, sharded(batch(step, env.rank, env.world_size)))
        outputs.append([column.detach().clone() for column in columns])
        torch.autograd.backward(columns, [env.world_size * (column.detach() + 1.0) for column in columns])
    return outputs


def rows_by_key(state: dict[str, torch.Tensor], of: torch.Tensor | None = None) -> dict[int, list[float]]:
    used = state[KEYS.replace("keys", "uses")].squeeze(1) > 0
    values = state[WEIGHT] if of is None else of
    return dict(zip(state[KEYS][used].squeeze(1).tolist(), values[used].tolist(), strict=True))


def reference(setup: Setup, steps: Sequence[int]) -> tuple[list[list[torch.Tensor]], dict[int, torch.Tensor]]:
    """One process with a dictionary: SGD on rows that are born at first sight, without a capacity."""
    scale, rows = (1 / setup.capacity) ** 0.5, {}
    outputs = []
    for step in steps:
        whole = batch(step, 0, 1)
        for key in [*whole["a"].values().tolist(), *whole["b"].values().tolist()]:
            if key not in rows:
                columns = sw.ColumnRange(0, DIM)
                rows[key] = first_values(torch.tensor([key]), columns, table="item", scale=scale)[0]
        made, changes = [], []
        for feature in "ab":
            bags = [bag.tolist() for bag in whole[feature].to_dense()]
            if not setup.is_pooled:
                bags = [[key] for bag in bags for key in bag]
            sums = [sum((rows[key] for key in bag), torch.zeros(DIM)) for bag in bags]
            made.append(torch.stack(sums) if sums else torch.zeros(0, DIM))
            changes += [(key, own + 1.0) for bag, own in zip(bags, sums, strict=True) for key in bag]
        for key, gradient in changes:
            rows[key] = rows[key] - RATE * gradient
        outputs.append(made)
    return outputs, rows


@pytest.mark.parametrize("is_pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hashed_table_trains_as_a_dictionary_of_rows_does(world_size: int, is_pooled: bool) -> None:
    setup = Setup(capacity=200, is_pooled=is_pooled)
    plan = setup.plan(world_size)

    def work(env: sw.ShardingEnv) -> Any:
        sharded = setup.shard(env, plan)
        return train(setup, sharded, env, range(4)), sharded.full_state_dict()

    results = run_simulated(work, world_size)
    outputs, rows = reference(setup, range(4))
    for step, expected in enumerate(outputs):
        for column, values in enumerate(expected):
            found = torch.cat([own[step][column] for own, _ in results])
            torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-4)
    state = results[0][1]
    prefix = "embedding_bags" if is_pooled else "embeddings"
    state = {name.replace(prefix, "embedding_bags"): value for name, value in state.items()}
    found = rows_by_key(state)
    assert found.keys() == rows.keys()
    for key, row in rows.items():
        torch.testing.assert_close(torch.tensor(found[key]), row, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adam"])
@pytest.mark.parametrize("other", [1, 3])
def test_checkpoint_of_two_ranks_goes_on_with_another_number_of_ranks(other: int, optimizer: str) -> None:
    setup = Setup(capacity=200, optimizer=optimizer)
    plan, moved_plan = setup.plan(2), setup.plan(other)

    def begin(env: sw.ShardingEnv) -> Any:
        sharded = setup.shard(env, plan)
        train(setup, sharded, env, range(3))
        saved = sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()
        return saved, train(setup, sharded, env, range(3, 6)), sharded.full_state_dict()

    results = run_simulated(begin, 2)
    (state, optimizer_state), _, expected = results[0]
    assert state[KEYS].dtype == torch.int64

    def go_on(env: sw.ShardingEnv) -> Any:
        sharded = setup.shard(env, moved_plan)
        sharded.load_state_dict(state)
        sharded.fused_optimizer.load_state_dict(optimizer_state)
        loaded = sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()
        return loaded, train(setup, sharded, env, range(3, 6)), sharded.full_state_dict()

    moved = run_simulated(go_on, other)
    (loaded, loaded_optimizer), _, final = moved[0]
    assert rows_by_key(loaded) == rows_by_key(state)
    for name, values in optimizer_state["state"][WEIGHT].items():
        if name != "step":
            there = loaded_optimizer["state"][WEIGHT][name]
            assert rows_by_key(loaded, there) == rows_by_key(state, values)
    for step in range(3):
        for column in range(2):
            found = torch.cat([own[step][column] for _, own, _ in moved])
            wanted = torch.cat([own[step][column] for _, own, _ in results])
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    found, wanted = rows_by_key(final), rows_by_key(expected)
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(row), rtol=1e-4, atol=1e-4)


def cut_anew(plan: sw.ShardingPlan, parts: int, first: int, world_size: int) -> sw.ShardingPlan:
    """The plan with keys in so many parts, the first of which is on a given rank; and rows dealt out."""
    item, plain = plan.plan[""]["item"], plan.plan[""]["plain"]
    hashed = HashedIds(item.layout.row_map.num_rows, parts=parts)
    layouts = {"item": hashed, "plain": sw.RowsModulo(9, parts=parts)}
    made = {
        name: attrs.evolve(
            own,
            layout=sw.Layout(
                [
                    sw.Block(part, sw.ColumnRange(0, DIM), (first + number) % world_size)
                    for number, part in enumerate(layouts[name])
                ],
                extras=own.layout.extras,
            ),
        )
        for name, own in (("item", item), ("plain", plain))
    }
    return sw.ShardingPlan({"": sw.EmbeddingModuleShardingPlan(made)})


@pytest.mark.parametrize(("optimizer", "limit"), in_turns(["row_wise_adagrad", "adam"], [None, 1 << 20]))
def test_reshard_keeps_rows_uses_and_states_of_all_keys_and_training_goes_on(
    optimizer: str, limit: int | None
) -> None:
    setup, world_size = Setup(capacity=400, optimizer=optimizer), 3
    plan = setup.plan(world_size)
    chain = [cut_anew(plan, parts, first, world_size) for parts, first in ((3, 1), (5, 0), (1, 2), (2, 1))]

    def work(env: sw.ShardingEnv) -> Any:
        sharded = setup.shard(env, plan)
        outputs, kept = train(setup, sharded, env, [0, 1]), []
        for step, then in enumerate([*chain, plan], start=2):
            before = sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()["state"][WEIGHT]
            reshard_collection(sharded, then.plan[""], max_extra_bytes=limit, piece_bytes=300)
            after = sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()["state"][WEIGHT]
            kept.append((before, after))
            outputs += train(setup, sharded, env, [step])
        return kept, outputs

    def stay(env: sw.ShardingEnv) -> Any:
        return train(setup, setup.shard(env, plan), env, range(2 + len(chain) + 1))

    results, expected = run_simulated(work, world_size), run_simulated(stay, world_size)
    for (before, states), (after, moved) in results[0][0]:
        for entry in (None, USES, USES.replace("uses", "last_use")):
            assert rows_by_key(after, after.get(entry)) == rows_by_key(before, before.get(entry))
        for entry in states.keys() - {"step"}:
            assert rows_by_key(after, moved[entry]) == rows_by_key(before, states[entry])
        assert states.get("step") == moved.get("step")
        assert torch.equal(after["embedding_bags.plain.weight"], before["embedding_bags.plain.weight"])
    for (_, outputs), wanted in zip(results, expected, strict=True):
        for columns, others in zip(outputs, wanted, strict=True):
            torch.testing.assert_close(columns, others, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_resharded", [False, True], ids=["loaded", "resharded"])
def test_fewer_rows_than_keys_keep_those_used_last(is_resharded: bool) -> None:
    """Capacity is by rank: hashes may give one rank more ids than it has rows for."""
    setup = Setup(capacity=8)
    one, two = (cut_anew(setup.plan(2), parts, first, 2) for parts, first in ((1, 1), (2, 0)))

    def work(env: sw.ShardingEnv) -> Any:
        sharded = setup.shard(env, one)
        for key in range(8):
            look_up(sharded, *([key] if env.rank else []))
        before = sharded.full_state_dict()
        if is_resharded:
            reshard_collection(sharded, two.plan[""])
        else:
            sharded = setup.shard(env, two)
            sharded.load_state_dict(before)
        return before, sharded.full_state_dict()

    before, after = (rows_by_key(state) for state in run_simulated(work, 2)[0])
    parts = two.plan[""]["item"].layout.row_map.part_of(np.arange(8))
    for part in (0, 1):
        kept = [key for key in range(8) if parts[key] == part][-4:]
        assert [key for key in range(8) if key in after and parts[key] == part] == kept
        assert all(after[key] == before[key] for key in kept)


def test_reshard_of_one_table_keeps_the_keys_of_another_in_its_kernel_group() -> None:
    setup, names = Setup(optimizer="adam"), ("item", "other")
    configs = [
        sw.EmbeddingBagConfig(name=name, num_embeddings=60, embedding_dim=DIM, feature_names=[feature])
        for name, feature in zip(names, "ab", strict=True)
    ]
    item = setup.plan(2).plan[""]["item"]
    swapped = attrs.evolve(item, layout=item.layout.placed([1, 0]))

    def work(env: sw.ShardingEnv) -> Any:
        module = sw.EmbeddingBagCollection(configs)
        sharded = setup.sharder.shard(module, dict.fromkeys(names, item), env, "cpu")
        assert len(sharded.engine.lookups) == 1
        for step in range(3):
            result = sharded(batch(step, env.rank, 2))
            result.values().square().sum().backward()
        before = sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()["state"]
        assert reshard_collection(sharded, {"item": swapped, "other": item}).tables == ("item",)
        return before, (sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()["state"])

    (before, states), (after, moved) = run_simulated(work, 2)[0]
    for name in names:
        here, there = (
            {key.replace(f".{name}.", ".item."): value for key, value in state.items() if f".{name}." in key}
            for state in (before, after)
        )
        assert rows_by_key(there) == rows_by_key(here)
        assert len(rows_by_key(there)) > 10
        for entry in ("exp_avg", "exp_avg_sq"):
            own = f"embedding_bags.{name}.weight"
            assert rows_by_key(there, moved[own][entry]) == rows_by_key(here, states[own][entry])


def test_reshard_from_keys_to_rows_is_refused() -> None:
    setup = Setup()
    plan = setup.plan(1)
    item = plan.plan[""]["item"]
    rows = sw.Layout([sw.Block(sw.RowsRange(60)[0], sw.ColumnRange(0, DIM), 0)])
    kernel = plan.plan[""]["plain"].compute_kernel
    then = {**plan.plan[""], "item": attrs.evolve(item, layout=rows, compute_kernel=kernel)}

    def work(env: sw.ShardingEnv) -> None:
        with pytest.raises(sw.UnsupportedError, match="its ids are keys now, and rows under the new plan"):
            reshard_collection(setup.shard(env, plan), then)

    run_simulated(work, 1)


def lone(setup: Setup, work: Any) -> Any:
    plan = setup.plan(1)
    return run_simulated(lambda env: work(setup.shard(env, plan)), 1)[0]


def bags_of(*ids: int) -> sw.KeyedJaggedTensor:
    """One bag an id of `a`; `b` and `c` are empty."""
    count = len(ids)
    return sw.KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor([1] * count + [0] * 2 * count, dtype=torch.int32),
    )


def look_up(sharded: Any, *ids: int) -> torch.Tensor:
    output = sharded(bags_of(*ids))["a"]
    if torch.is_grad_enabled():
        output.backward(torch.ones_like(output))
    return output.detach().clone()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kernel", ["hash_table", "hash_table_numba"])
def test_capacity_takes_no_memory_before_rows_are_born(kernel: str, optimizer: str) -> None:
    def grown(capacity: int) -> tuple[int, int]:
        setup = Setup(capacity, optimizer=optimizer)
        item = attrs.evolve(setup.plan(1).plan[""]["item"], compute_kernel=kernel)
        module = sw.EmbeddingBagCollection(
            [config for config in setup.module().tables if config.name == "item"], device="meta"
        )
        before = resident_bytes()
        sharded = setup.sharder.shard(module, {"item": item}, sw.ShardingEnv.local(device_type="cpu"), "cpu")
        first = [look_up(sharded, 5, -7).tolist() for _ in range(2)]
        assert all(map(any, first[1]))
        return resident_bytes() - before, capacity * DIM * 4

    grown(100)  # what is imported or compiled once
    taken, capacity_bytes = min(
        grown(4_000_000) for _ in range(3)
    )  # other tests' threads take memory meanwhile
    assert capacity_bytes == 64_000_000
    assert taken < 20_000_000


@pytest.mark.parametrize(("evict", "left"), [("lru", {1, 3}), ("lfu", {1, 3})])
def test_full_table_evicts_and_what_comes_back_begins_anew(evict: str, left: set[int]) -> None:
    def work(sharded: Any) -> Any:
        first = look_up(sharded, 2)
        for ids in ((1, 1, 1), (1, 3)):  # 3 needs the row of 2: 1 is used in this step, and more often
            look_up(sharded, *ids)
        state = sharded.full_state_dict()
        return first, state, look_up(sharded, 2)

    first, state, again = lone(Setup(capacity=2, rules=HashSettings(evict)), work)
    assert rows_by_key(state).keys() == left
    assert torch.equal(first, again)


def test_gradient_of_an_evicted_row_updates_no_other() -> None:
    def work(sharded: Any) -> Any:
        late = sharded(bags_of(1, 2))["a"]
        newer = sharded(bags_of(3, 4))["a"]  # takes both rows, before the gradients of the first come
        late.backward(torch.full_like(late, 100.0))
        with torch.no_grad():
            return newer.detach().clone(), look_up(sharded, 3, 4)

    newer, after = lone(Setup(capacity=2), work)
    assert torch.equal(newer, after)


@pytest.mark.parametrize("from_files", [False, True], ids=["state dict", "checkpoint"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_full_table_grows_when_it_is_loaded(world_size: int, from_files: bool, tmp_path: Path) -> None:
    """A larger table takes over the keys of a full one, their rows and states, and has room for more."""
    full, larger = (Setup(capacity=rows, optimizer="row_wise_adagrad") for rows in (4, 16))

    def fill(sharded: Any) -> Any:
        for key in range(4):
            look_up(sharded, key)
        sw.save_checkpoint(tmp_path, sharded, sharded.fused_optimizer)
        return sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()

    saved, plan = lone(full, fill), larger.plan(world_size)

    def load(env: sw.ShardingEnv) -> Any:
        sharded = larger.shard(env, plan)
        if from_files:
            sw.load_checkpoint(tmp_path, sharded, sharded.fused_optimizer)
        else:
            sharded.load_state_dict(saved[0])
            sharded.fused_optimizer.load_state_dict(saved[1])
        loaded = sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()
        look_up(sharded, *range(4, 8))
        return loaded, set(rows_by_key(sharded.full_state_dict()))

    loaded, keys = run_simulated(load, world_size)[0]
    assert rows_by_key(loaded[0]) == rows_by_key(saved[0])
    states = [rows_by_key(model, own["state"][WEIGHT]["sum"]) for model, own in (loaded, saved)]
    assert states[0] == states[1]
    assert all(any(values) for values in states[0].values())
    assert keys == set(range(8))


def state_of_eight_ids(sharded: Any) -> Any:
    """The state dicts of a model and its optimizer after eight ids, whatever the capacity."""
    look_up(sharded, *range(8))
    return sharded.full_state_dict(), sharded.fused_optimizer.full_state_dict()


def test_states_of_another_file_than_the_rows_are_refused_on_all_ranks() -> None:
    """The optimizer's state dict is of a table of 4 rows, the model's of one of 8: a row would have no state."""
    small, large = (Setup(capacity=rows, optimizer="row_wise_adagrad") for rows in (4, 8))

    states, model = lone(small, state_of_eight_ids)[1], lone(large, state_of_eight_ids)[0]
    plan = large.plan(2)

    def load(env: sw.ShardingEnv) -> str:
        sharded = large.shard(env, plan)
        sharded.load_state_dict(model)
        with pytest.raises(sw.InvalidInputError, match="load both from one checkpoint") as caught:
            sharded.fused_optimizer.load_state_dict(states)
        return str(caught.value)

    assert len(run_simulated(load, 2)) == 2


@pytest.mark.parametrize("short", [WEIGHT, KEYS])
def test_keys_and_weights_of_other_numbers_of_rows_are_refused(short: str) -> None:
    def load(sharded: Any) -> None:
        state = sharded.full_state_dict()
        with pytest.raises(RuntimeError, match="load both from one state dict"):
            sharded.load_state_dict({**state, short: state[short][:4]})

    lone(Setup(capacity=8), load)


def test_plan_reckons_with_capacity_and_index_and_comes_back_from_its_document() -> None:
    setup = Setup(capacity=1000)
    plan = setup.plan(2)
    item = plan.plan[""]["item"]
    assert (item.sharding_type, item.compute_kernel) == ("hash_rows", "hash_table_numba")
    assert sw.ShardingPlan.from_json(plan.to_json()) == plan
    sw.check_plan(plan)
    # 500 rows of 16 bytes and 32 of index each do not fit into 28 kB of which 15 % are kept free; of 16 alone they do.
    with pytest.raises(sw.PlanningError):
        setup.plan(2, ddr_cap=28_000)
    setup.plan(2, ddr_cap=60_000)


def test_hashed_table_is_not_planned_unasked_nor_with_a_kernel_of_rows() -> None:
    topology = sw.Topology(world_size=2, compute_device="cpu")
    table = sw.TableSpec("t", 1000, 8, ["f"])
    plan = sw.EmbeddingShardingPlanner(topology=topology, batch_size=4).plan_tables([table])
    assert plan.plan[""]["t"].compute_kernel == "fused_numba"
    rule = HashSettings().constraints(compute_kernels=["fused_torch"])
    with pytest.raises(sw.PlanningError, match="its ids are rows, and the layout sends it keys"):
        sw.EmbeddingShardingPlanner(topology=topology, batch_size=4, constraints={"t": rule}).plan_tables(
            [table]
        )


@pytest.mark.parametrize("asked", [{"weight_init_max": 0.5}, {"init_fn": torch.nn.init.ones_}])
def test_first_values_that_no_row_of_a_key_would_get_are_refused(asked: dict[str, Any]) -> None:
    setup = Setup()
    params = setup.plan(1).plan[""]

    def work(env: sw.ShardingEnv, name: str) -> Any:
        configs = [
            attrs.evolve(config, **asked if config.name == name else {}) for config in setup.module().tables
        ]
        return setup.sharder.shard(sw.EmbeddingBagCollection(configs, device="meta"), params, env, "cpu")

    with pytest.raises(sw.UnsupportedError, match=next(iter(asked))):
        run_simulated(lambda env: work(env, "item"), 1)
    run_simulated(lambda env: work(env, "plain"), 1)  # a table of rows draws them


def test_ids_of_a_table_of_rows_beside_it_are_still_checked() -> None:
    def work(sharded: Any) -> None:
        features = sw.KeyedJaggedTensor(
            keys=["a", "b", "c"], values=torch.tensor([1 << 40, -5, 9]), lengths=torch.tensor([1, 1, 1])
        )
        sharded(features)

    with pytest.raises(sw.InvalidInputError, match=r"feature 'c' of table 'plain' .* has the id 9"):
        lone(Setup(), work)


def test_hashed_table_in_use_changes_nothing_of_core_or_plugins() -> None:
    lone(Setup(), lambda sharded: look_up(sharded, 1, 2, 1 << 50))
    with distributions.nothing_changes():
        lone(Setup(), lambda sharded: look_up(sharded, 1, 2, 1 << 50))
