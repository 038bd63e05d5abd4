"""Dense modules, models, data sets and small functions under TorchRec's names, against independent computations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shardwright_torchrec.datasets.criteo import (
    InMemoryBinaryCriteoIterDataPipe,
)
from shardwright_torchrec.datasets.random import RandomRecDataset
from shardwright_torchrec.datasets.utils import Batch
from shardwright_torchrec.distributed.comm import (
    get_free_port,
    get_group_rank,
    get_local_rank,
    get_local_size,
    get_num_groups,
)
from shardwright_torchrec.models.deepfm import SimpleDeepFMNN
from shardwright_torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain, choose
from shardwright_torchrec.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
)
from shardwright_torchrec.modules.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
    PositionWeightedModuleDict,
)
from shardwright_torchrec.modules.mlp import MLP
from shardwright_torchrec.modules.regroup import KTRegroupAsDict
from shardwright_torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer

import shardwright as sw

B, F, D, DENSE = 5, 3, 8, 4


def bags(**further: bool) -> sw.EmbeddingBagCollection:
    tables = [
        sw.EmbeddingBagConfig(name=f"t{i}", embedding_dim=D, num_embeddings=10, feature_names=[f"f{i}"])
        for i in range(F)
    ]
    return sw.EmbeddingBagCollection(tables, **further)


def batch() -> sw.KeyedJaggedTensor:
    return sw.KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(F)],
        values=torch.arange(24) % 10,
        lengths=torch.tensor([2, 1, 0, 3, 2] * F),
    )


def test_dlrm_takes_the_products_of_all_pairs() -> None:
    model, dense, sparse = DLRM(bags(), DENSE, [16, D], [6, 1]), torch.rand(B, DENSE), batch()
    first = model.dense_arch(dense)
    vectors = [first, *model.sparse_arch.embedding_bag_collection(sparse).values().split(D, dim=1)]
    products = [(one * other).sum(1) for one, other in itertools.combinations(vectors, 2)]
    assert len(products) == F + choose(F, 2)
    expected = model.over_arch(torch.cat([first, torch.stack(products, dim=1)], dim=1))
    torch.testing.assert_close(model(dense, sparse), expected)
    assert model.sparse_arch.sparse_feature_names == ["f0", "f1", "f2"]


@pytest.mark.parametrize(
    "model",
    [
        lambda: DLRM_DCN(bags(), DENSE, [D], [6, 1], dcn_num_layers=2, dcn_low_rank_dim=3),
        lambda: DLRM_Projection(bags(), DENSE, [D], [6, 1], [2 * D], [3 * D]),
    ],
    ids=["DCN", "projection"],
)
def test_dlrms_other_interactions_train(model: Callable[[], DLRM]) -> None:
    train = DLRMTrain(model())
    data = Batch(torch.rand(B, DENSE), batch(), torch.tensor([0, 1, 1, 0, 1]))
    loss, (detached, logits, labels) = train(data)
    loss.backward()
    assert logits.shape == labels.shape == (B,)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
    assert float(detached) == pytest.approx(float(expected))
    assert all(parameter.grad is not None for parameter in train.parameters())


def test_dlrm_of_a_wrong_width_says_which() -> None:
    with pytest.raises(sw.InvalidInputError, match="embedding_dim, 8"):
        DLRM(bags(), DENSE, [16], [6, 1])
    with pytest.raises(sw.InvalidInputError, match="two layers"):
        DLRM(bags(), DENSE, [D], [1])


def test_deepfm_gives_probabilities() -> None:
    found = SimpleDeepFMNN(DENSE, bags(), 6, 5)(torch.rand(B, DENSE), batch())
    assert found.shape == (B, 1)
    assert ((found > 0) & (found < 1)).all()


def test_crossnets_follow_their_formulas() -> None:
    x = torch.rand(B, 4)
    full, thin = CrossNet(4, 2), LowRankCrossNet(4, 2, 3)
    expected = [x, x]
    for i in range(2):
        a, b = expected
        w, v = thin.W_kernels[i], thin.V_kernels[i]
        expected = [
            x * torch.stack([full.kernels[i] @ row + full.bias[i][:, 0] for row in a]) + a,
            x * torch.stack([w @ (v @ row) + thin.bias[i] for row in b]) + b,
        ]
    for module, value in zip((full, thin), expected, strict=True):
        torch.testing.assert_close(module(x), value)


def test_mlp_of_an_unknown_activation_names_those_known() -> None:
    with pytest.raises(sw.InvalidInputError, match=r"'swish'.*relu, sigmoid, swish_layernorm"):
        MLP(4, [2], activation="swish")


def test_bag_with_more_ids_than_position_weights_is_an_error() -> None:
    long = sw.JaggedTensor(torch.arange(4), lengths=torch.tensor([1, 3]))
    text = "the longest bag has 3 ids, and 2 positions have a weight"
    with pytest.raises(sw.InvalidInputError, match=text):
        PositionWeightedModule(2)(long)
    with pytest.raises(sw.InvalidInputError, match=text):
        PositionWeightedModuleCollection({"a": 2})(sw.KeyedJaggedTensor.from_jt_dict({"a": long}))


def test_position_weights_are_those_of_places_in_bags() -> None:
    processor = PositionWeightedModuleCollection({"f0": 3, "f1": 3})
    with torch.no_grad():
        processor.position_weights["f0"].copy_(torch.tensor([5.0, 6.0, 7.0]))
    weights = processor(batch())["f0"].weights()
    assert weights.tolist() == [5, 6, 5, 5, 6, 7, 5, 6]
    assert processor(batch())["f2"].weights().tolist() == [1.0] * 8
    one = PositionWeightedModule(3)(batch()["f0"])
    several = PositionWeightedModuleDict({"f0": 3})(batch().to_dict())
    assert one.weights().tolist() == several["f0"].weights().tolist() == [1.0] * 8


def test_processed_collection_is_the_weighted_collection_of_what_was_processed() -> None:
    own = bags(is_weighted=True)
    processors = {"f0": PositionWeightedModule(3)}
    with torch.no_grad():
        processors["f0"].position_weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    found = FeatureProcessedEmbeddingBagCollection(own, processors)(batch()).values()
    weights = torch.tensor([1.0, 2, 1, 1, 2, 3, 1, 2] + [1.0] * 16)
    given = sw.KeyedJaggedTensor(
        keys=batch().keys(), values=batch().values(), lengths=batch().lengths(), weights=weights
    )
    torch.testing.assert_close(found, own(given).values())
    whole = FeatureProcessedEmbeddingBagCollection(own, processors)
    process, collection = whole.split()
    torch.testing.assert_close(collection(process(batch())).values(), found)
    assert [name for name, _ in process.named_parameters()] == ["_feature_processors.f0.position_weight"]
    of_all = PositionWeightedModuleCollection({"f0": 3})
    assert FeatureProcessedEmbeddingBagCollection(own, of_all).split() == (of_all, own)
    saved = whole.state_dict()
    assert "_feature_processors.f0.position_weight" in saved
    with pytest.raises(sw.InvalidInputError, match="is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(bags(), processors)


def test_regroup_joins_columns_by_group() -> None:
    pooled = bags()(batch())
    groups = KTRegroupAsDict([["f0", "f2"], ["f1"]], ["sides", "middle"])([pooled])
    assert torch.equal(groups["sides"], torch.cat([pooled["f0"], pooled["f2"]], dim=1))
    assert torch.equal(groups["middle"], pooled["f1"])


def keyed(parameter: torch.nn.Parameter) -> sw.KeyedOptimizer:
    return sw.KeyedOptimizerWrapper({"w": parameter}, lambda params: torch.optim.SGD(params, lr=1.0))


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [
        (GradientClipping.NORM, [-0.06, -0.08]),
        (GradientClipping.VALUE, [-0.1, -0.1]),
        (GradientClipping.NONE, [-3.0, -4.0]),
    ],
)
def test_clipping_optimizer_clips_before_it_steps(clipping: GradientClipping, expected: list[float]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = GradientClippingOptimizer(keyed(parameter), clipping, max_gradient=0.1, track_grad_norm=True)
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx(expected, rel=1e-3)
    if clipping is GradientClipping.NORM:
        assert float(optimizer.last_total_grad_norm) == pytest.approx(5.0)  # type: ignore[arg-type]


def test_random_dataset_repeats_with_its_seed_and_stays_within_its_tables() -> None:
    def made() -> list[Batch]:
        return list(
            RandomRecDataset(
                ["a", "b"],
                4,
                hash_sizes=[3, 50],
                ids_per_features=[2, 5],
                min_ids_per_features=[2, 0],
                num_dense=6,
                manual_seed=7,
                num_batches=3,
            )
        )

    first, again = made(), made()
    assert len(first) == 3
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.sparse_features.values(), other.sparse_features.values())
        assert one.dense_features.shape == (4, 6)
        assert one.sparse_features["a"].lengths().tolist() == [2] * 4
        assert one.sparse_features["b"].lengths().max() <= 5
        assert one.sparse_features["a"].values().max() < 3
        assert set(one.labels.tolist()) <= {0, 1}
    with pytest.raises(sw.InvalidInputError, match="2 values for 1 keys"):
        RandomRecDataset(["a"], 4, hash_sizes=[1, 2])
    assert len(list(islice(RandomRecDataset(["a"], 4), 5))) == 5


@pytest.fixture
def criteo(tmp_path: Path) -> dict[str, list[str]]:
    """Two days of 7 and 4 samples, whose labels number them."""
    paths: dict[str, list[str]] = {"dense": [], "sparse": [], "labels": []}
    for day, rows in enumerate([range(7), range(7, 11)]):
        numbers = np.array(rows)[:, None]
        for name, array in (
            ("dense", np.repeat(numbers, 13, 1).astype(np.float32)),
            ("sparse", np.repeat(numbers, 26, 1).astype(np.int32)),
            ("labels", numbers.astype(np.int32)),
        ):
            path = tmp_path / f"{name}_{day}.npy"
            np.save(path, array)
            paths[name].append(str(path))
    return paths


@pytest.mark.parametrize("mmap_mode", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_criteo_arrays_are_dealt_to_ranks_once(
    criteo: dict[str, list[str]], mmap_mode: bool, drop_last: bool
) -> None:
    seen = []
    for rank in range(3):
        data = InMemoryBinaryCriteoIterDataPipe(
            "train",
            *criteo.values(),
            batch_size=3,
            rank=rank,
            world_size=3,
            drop_last=drop_last,
            mmap_mode=mmap_mode,
            hashes=[5] * 26,
        )
        batches = list(data)
        assert len(batches) == len(data)
        for one in batches:
            seen += one.labels.tolist()
            assert one.dense_features[:, 0].tolist() == one.labels.tolist()
            assert one.sparse_features["cat_25"].values().tolist() == [
                label % 5 for label in one.labels.tolist()
            ]
    assert seen == ([0, 1, 2, 4, 5, 6, 8, 9, 10] if drop_last else list(range(11)))


def test_criteo_arrays_shuffled_are_the_same_samples(criteo: dict[str, list[str]]) -> None:
    data = InMemoryBinaryCriteoIterDataPipe(
        "train", *criteo.values(), 4, rank=0, world_size=1, shuffle_batches=True, shuffle_training_set=True
    )
    assert sorted(label for one in data for label in one.labels.tolist()) == list(range(11))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")


@pytest.mark.usefixtures("launched")
def test_local_ranks_are_the_launchers() -> None:
    assert (get_local_size(4), get_local_rank(4, 3), get_group_rank(4, 3), get_num_groups(4)) == (2, 1, 1, 2)
    assert get_local_size(3) == 3  # what the launcher says cannot be


def test_free_port_can_be_listened_at() -> None:
    dist.TCPStore("localhost", get_free_port(), world_size=1, is_master=True).set("key", "value")


@pytest.mark.usefixtures("group")
def test_local_ranks_without_a_launcher_are_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (get_local_size(), get_local_rank(), get_num_groups()) == (1, 0, 1)
