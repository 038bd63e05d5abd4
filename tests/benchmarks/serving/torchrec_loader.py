"""The load test's model of TorchRec's `quant` modules, loaded by the server: only torch and TorchRec are imported.

Annotations are no strings here: `torch.jit` reads them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torchrec
from torch import Tensor, nn
from torchrec.inference.modules import quantize_embeddings


class Model(nn.Module):
    """The sum of each feature's rows, and a linear layer over all of them."""

    def __init__(self, names: list[str], rows: int, dim: int) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=rows, embedding_dim=dim, feature_names=[name]
            )
            for name in names
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(len(names) * dim, 1)

    def forward(self, features: torchrec.KeyedJaggedTensor) -> Tensor:
        return torch.sigmoid(self.over(self.bags(features).values())).squeeze(1)


class OfTensors(nn.Module):
    """A model with the plain inputs of a package."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        features = torchrec.KeyedJaggedTensor(keys=self.names, values=values, lengths=lengths)
        output: Tensor = self.model(features)
        return output


def eager(folder: Path) -> Callable[..., Tensor]:
    """Load the model as it is after quantization."""
    names = [feature["name"] for feature in json.loads((folder / "package.json").read_text())["features"]]
    state = torch.load(folder / "model.pt", mmap=True)
    rows, dim = state[f"bags.embedding_bags.t_{names[0]}.weight"].shape
    model = Model(names, rows, dim)
    model.load_state_dict(state)
    quantized = quantize_embeddings(model.eval(), torch.qint8, inplace=True, output_dtype=torch.float32)
    return OfTensors(quantized, names)


def scripted(folder: Path) -> Callable[..., Tensor]:
    """Load the model, trace and script it, as TorchRec's introduction does for C++."""
    from torchrec.fx import symbolic_trace

    made = eager(folder)
    assert isinstance(made, OfTensors)
    script: Callable[..., Tensor] = torch.jit.script(symbolic_trace(made))
    return script
