"""Clicks drawn from a known model, so that the best AUC that can be reached is known too.

The shapes are those of Criteo's click logs: 13 dense features and 26 categorical ones, some of them bags of ids. The
probability of a click is ``sigmoid(bias + dense effects + effects of the ids)``. The effects of ids are drawn once,
from the seed: nothing but an embedding for each id can learn them.

Shapes: B examples, D dense features, T tables (one feature each), N ids in all, R rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

NUM_DENSE = 13
# Values of each categorical feature of the Criteo Kaggle data set; ours are cut at MAX_ROWS.
# fmt: off
_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# fmt: on
MAX_ROWS = 10_000
ZIPF_EXPONENT = 1.3
MULTI_HOT_TABLES = (0, 6, 10, 14)
MAX_BAG = 6
"""Bags of the multi-hot tables have 0 to so many ids."""
# Parts of the logit's standard deviation: they set the best AUC, near 0.8 as on click logs.
_DENSE_DEVIATION, _IDS_DEVIATION, _BIAS = 0.5, 1.5, -1.2
_EFFECTS, _TRAINING, _HELD_OUT = range(3)  # streams of random numbers
_EVALUATED = 4096
"""Held-out examples of a batch, of all ranks together."""


@frozen
class Table:
    """A categorical feature and the embedding table that it looks up."""

    feature: str
    num_rows: int
    max_bag: int = 1

    @property
    def name(self) -> str:
        """Name of the table in the module and in the plan."""
        return f"t_{self.feature}"

    @property
    def mean_bag(self) -> float:
        """Mean number of ids of an example."""
        return 1.0 if self.max_bag == 1 else self.max_bag / 2


@frozen(eq=False)
class Examples:
    """Some examples, categorical features one after the other.

    Args:
        dense: ``[B, D]`` float32.
        lengths: ``[T, B]`` int32, how many ids each bag has.
        ids: ``[N]`` int64, bag after bag in the order of ``lengths``.
        labels: ``[B]`` float32, 0 or 1.
        true_logits: ``[B]`` float64, with which the labels were drawn.
    """

    dense: NDArray[np.float32]
    lengths: NDArray[np.int32]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    true_logits: NDArray[np.float64]


@frozen(eq=False)
class _Vocabulary:
    """A table's ids in the order of popularity.

    Args:
        cumulative: ``[R]`` probability that an id is among the first so many.
        rows: ``[R]`` the row of each: popular ids are strewn over the table, as hashing strews them.
        effects: ``[R]`` what an id adds to the logit, of mean 0 and deviation 1 over draws.
    """

    cumulative: NDArray[np.float64]
    rows: NDArray[np.int64]
    effects: NDArray[np.float64]


class Clicks:
    """Endless batches to train on, and a fixed number of held-out examples, of one model.

    A batch is a function of the seed and its number. Each rank draws the whole batch and keeps its share, so that the
    batch is the same on any number of ranks.

    Args:
        seed: seed of the model and of all draws.
        batch_size: examples of a batch, over all ranks.
    """

    def __init__(self, seed: int, batch_size: int) -> None:
        self._seed, self._batch_size = seed, batch_size
        self.tables = tuple(
            Table(f"cat_{index}", min(rows, MAX_ROWS), MAX_BAG if index in MULTI_HOT_TABLES else 1)
            for index, rows in enumerate(_CARDINALITIES)
        )
        generator = np.random.default_rng([seed, _EFFECTS])
        weights = generator.standard_normal(NUM_DENSE)
        self._dense_weights = weights / np.linalg.norm(weights)
        self._vocabularies = [_vocabulary(generator, table.num_rows) for table in self.tables]

    def training_batches(self, rank: int, world_size: int) -> Iterator[Examples]:
        """Yield this rank's shares of batch 0, 1, ..., without end."""
        for number in count():
            yield self._draw(_TRAINING, number, self._batch_size, rank, world_size)

    def held_out_batches(self, num_examples: int, rank: int, world_size: int) -> Iterator[Examples]:
        """Yield this rank's shares of so many examples that are never trained on; all ranks get as many batches."""
        size = max(self._batch_size, _EVALUATED)
        for number, start in enumerate(range(0, num_examples, size)):
            yield self._draw(_HELD_OUT, number, min(size, num_examples - start), rank, world_size)

    def _draw(self, stream: int, number: int, size: int, rank: int, world_size: int) -> Examples:
        generator = np.random.default_rng([self._seed, stream, number])
        share = slice(size * rank // world_size, size * (rank + 1) // world_size)
        dense = generator.standard_normal((size, NUM_DENSE))
        # A linear function and a curve, of deviation near 1.
        bend = (dense[:, 0] ** 2 - 1) / np.sqrt(2)
        logits = _BIAS + _DENSE_DEVIATION * (0.8 * dense @ self._dense_weights + 0.6 * bend)
        lengths, ids = [], []
        for table, vocabulary in zip(self.tables, self._vocabularies, strict=True):
            bags = np.ones(size, dtype=np.int32)
            if table.max_bag > 1:
                bags = generator.integers(0, table.max_bag + 1, size, dtype=np.int32)
            is_id = np.arange(table.max_bag) < bags[:, None]
            places = np.searchsorted(vocabulary.cumulative, generator.random(is_id.shape), side="right")
            effects = np.where(is_id, vocabulary.effects[places], 0.0).sum(axis=1) / np.sqrt(table.mean_bag)
            logits += _IDS_DEVIATION / np.sqrt(len(self.tables)) * effects
            lengths.append(bags[share])
            ids.append(vocabulary.rows[places[share][is_id[share]]])
        labels = generator.random(size) < 1 / (1 + np.exp(-logits))
        return Examples(
            dense=dense[share].astype(np.float32),
            lengths=np.stack(lengths),
            ids=np.concatenate(ids),
            labels=labels[share].astype(np.float32),
            true_logits=logits[share],
        )


def _vocabulary(generator: np.random.Generator, num_rows: int) -> _Vocabulary:
    weights = np.arange(1.0, num_rows + 1) ** -ZIPF_EXPONENT
    probabilities: NDArray[np.float64] = weights / weights.sum()
    effects = generator.standard_normal(num_rows)
    centred = effects - probabilities @ effects
    cumulative = np.cumsum(probabilities)
    cumulative[-1] = 1.0  # the sum is that up to rounding only
    return _Vocabulary(
        cumulative, generator.permutation(num_rows), centred / np.sqrt(probabilities @ centred**2)
    )
