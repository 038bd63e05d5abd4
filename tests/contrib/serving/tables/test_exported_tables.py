"""`torch.export` of models with quantized tables, which needs operators of torch alone."""

from __future__ import annotations

import pytest
import shardwright_serving as serving
import torch
from tests.core.modules.test_export import Model, batch
from torch.export import Dim


@pytest.mark.parametrize("precision", ["INT8", "INT4", "FP8"])
def test_exported_quantized_model_gives_for_other_batches_what_the_module_gives(precision: str) -> None:
    model = serving.quantize_embeddings(Model(is_weighted=False), precision)
    first = batch([[1, 2], [3]], [[], [39]], is_weighted=False)
    program = torch.export.export(model, (first,), dynamic_shapes=([{0: Dim.DYNAMIC}, None],)).module()
    features = batch([[], [7, 8, 9]], [[1], [2, 2]], is_weighted=False)
    torch.testing.assert_close(program(features), model(features))
