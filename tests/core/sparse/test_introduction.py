"""The sparse types' part of the introduction tutorial, with what its lines print."""

from __future__ import annotations

import pytest
import torch

from shardwright.sparse import JaggedTensor, KeyedJaggedTensor

pytestmark = pytest.mark.usefixtures("ops_path")


def test_introduction_jagged_tensor_prints_as_the_tutorial_says() -> None:
    id_list_feature_lengths = torch.tensor([1, 2])
    id_list_feature_values = torch.tensor([5, 7, 1])

    jt = JaggedTensor(values=id_list_feature_values, lengths=id_list_feature_lengths)

    assert jt.offsets().tolist() == [0, 1, 3]
    assert [bag.tolist() for bag in jt.to_dense()] == [[5], [7, 1]]
    assert str(jt) == "JaggedTensor({\n    [[5], [7, 1]]\n})"


def test_introduction_keyed_jagged_tensor_prints_as_the_tutorial_says() -> None:
    product_jt = JaggedTensor(values=torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1]))
    user_jt = JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2]))

    kjt = KeyedJaggedTensor.from_jt_dict({"product": product_jt, "user": user_jt})

    assert kjt.keys() == ["product", "user"]
    assert kjt.lengths().tolist() == [3, 1, 2, 2]
    assert kjt.values().tolist() == [1, 2, 1, 5, 2, 3, 4, 1]
    assert kjt.offsets().tolist() == [0, 3, 4, 6, 8]
    assert {key: [bag.tolist() for bag in jt.to_dense()] for key, jt in kjt.to_dict().items()} == {
        "product": [[1, 2, 1], [5]],
        "user": [[2, 3], [4, 1]],
    }
    assert str(kjt) == (
        'KeyedJaggedTensor({\n    "product": [[1, 2, 1], [5]],\n    "user": [[2, 3], [4, 1]]\n})'
    )
