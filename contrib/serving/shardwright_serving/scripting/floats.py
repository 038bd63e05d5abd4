"""Collections of float tables in TorchScript: modules of the same tables, by statements that it compiles.

They share the collection's parameters under its names. `torch.fx` takes the statements down, too.

TorchScript reads annotations, so they are no text here.

Legend: V ids, B bags, R rows, D columns of a table.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional

from shardwright import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    TableCollection,
)


def _evenly_bagged(features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """The bags of each feature, of the same samples: a graph has no way for batch sizes of their own."""
    assert not features.variable_stride_per_key(), "features of a graph cannot have batch sizes of their own"
    return features.to_dict()


def _rows(weight: Tensor, ids: Tensor) -> Tensor:
    """The rows of ids, float32 whatever the table's type: ``[V, D]``."""
    # Floats would be cut silently where nothing else is checked.
    assert not ids.is_floating_point(), "ids are floats: convert them, .long()"
    return functional.embedding(ids.long(), weight).float()


def _pooled(weight: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, is_mean: bool) -> Tensor:
    """Sum or average the rows of each bag, as the collection does: ``[B, D]`` float32."""
    rows, offsets = _rows(weight, ids), offsets.long()
    places = torch.arange(ids.shape[0], device=ids.device)
    sums = functional.embedding_bag(
        places, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    if is_mean:
        return sums / offsets.diff().clamp(min=1).unsqueeze(1)
    return sums


# Nodes of a trace as they are: they look at what a batch or a table is.
for _name in ("_evenly_bagged", "_pooled", "_rows"):
    torch.fx.wrap(_name)


class _Scriptable(nn.Module):
    """The common part: where TorchScript compiles plain statements, and Python calls the collection."""

    __jit_unused_properties__: ClassVar[list[str]] = ["tables", "device"]
    features: list[list[str]]
    names: list[list[str]]

    @classmethod
    def of(cls, collection: Any) -> Any:
        """A module that shares the tables of a collection."""
        made = cls.__new__(cls)
        made.__dict__.update(collection.__dict__)
        made.features = [list(table.feature_names) for table in collection.tables]
        made.names = collection.embedding_names_by_table()
        return made


class ScriptableBags(_Scriptable, EmbeddingBagCollection):
    """An `EmbeddingBagCollection` that TorchScript compiles, and `torch.fx` looks into where it is traced alone."""

    weights_of_ids: bool

    @classmethod
    def of(cls, collection: EmbeddingBagCollection) -> Any:
        """A module that shares the tables of a collection."""
        made = super().of(collection)
        made.weights_of_ids = collection.is_weighted()
        return made

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the bags of all features."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self.in_graph(features)
        else:  # TorchScript would compile what stands below the condition
            return self.in_python(features)

    def in_python(self, features: Any) -> KeyedTensor:
        """Pool as the collection does, with its checks."""
        if isinstance(features, Proxy):
            return self.in_graph(features)  # type: ignore[arg-type]
        return EmbeddingBagCollection.forward(self, features)

    def in_graph(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool by statements that TorchScript compiles, and `torch.fx` takes down."""
        bags = _evenly_bagged(features)
        names: list[str] = []
        dims: list[int] = []
        pooled: list[Tensor] = []
        for number, table in enumerate(self.embedding_bags.values()):
            for place, feature in enumerate(self.features[number]):
                own = bags[feature]
                weights: Tensor | None = None
                if self.weights_of_ids:
                    weights = own.weights().float()
                is_mean = table.mode == "mean"
                pooled.append(_pooled(table.weight, own.values(), own.offsets(), weights, is_mean))  # type: ignore[arg-type]
                names.append(self.names[number][place])
                dims.append(table.embedding_dim)  # type: ignore[arg-type]
        return KeyedTensor(names, dims, torch.cat(pooled, dim=1))


class ScriptableSequences(_Scriptable, EmbeddingCollection):
    """An `EmbeddingCollection` that TorchScript compiles, and `torch.fx` looks into where it is traced alone."""

    gives_ids: bool

    @classmethod
    def of(cls, collection: EmbeddingCollection) -> Any:
        """A module that shares the tables of a collection."""
        made = super().of(collection)
        made.gives_ids = collection.need_indices()
        return made

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up the ids of all features."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self.in_graph(features)
        else:  # TorchScript would compile what stands below the condition
            return self.in_python(features)

    def in_python(self, features: Any) -> dict[str, JaggedTensor]:
        """Look up as the collection does, with its checks."""
        if isinstance(features, Proxy):
            return self.in_graph(features)  # type: ignore[arg-type]
        return EmbeddingCollection.forward(self, features)

    def in_graph(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up by statements that TorchScript compiles, and `torch.fx` takes down."""
        bags = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        for number, table in enumerate(self.embeddings.values()):
            for place, feature in enumerate(self.features[number]):
                own = bags[feature]
                indices: Tensor | None = None
                if self.gives_ids:
                    indices = own.values()
                rows = _rows(table.weight, own.values())  # type: ignore[arg-type]
                found[self.names[number][place]] = JaggedTensor(rows, indices, own.lengths())
        return found


def scriptable_collection(collection: TableCollection) -> Any:
    """The module that stands for a collection of float tables in TorchScript, and in a trace of it alone.

    `torch.jit.script` leaves it in the collection's place in the model: in Python it is what the collection was.
    """
    if isinstance(collection, _Scriptable):
        return collection
    kind = ScriptableBags if isinstance(collection, EmbeddingBagCollection) else ScriptableSequences
    return kind.of(collection)  # type: ignore[arg-type]  # of its kind
