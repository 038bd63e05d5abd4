"""Criteo-shaped examples drawn from a known model, so that the best reachable AUC is known too.

Each example is a function of (seed, its number): a counter-based generator (Philox, Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3") is set to the example's place and read. So any rank draws any
slice of any batch by itself, and what is drawn does not depend on the number of ranks.

The click probability is `sigmoid(bias + dense effects + per-id effects + products of per-id factors)`. The
effects of the ids are drawn once, from the seed: nothing but an embedding per id can learn them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np

from shardwright_plugins.commands.demo.examples import (
    NUM_CATEGORICAL,
    NUM_DENSE,
    Examples,
    Source,
    Table,
    share,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GenerativeModel", "SyntheticSource"]

# How many values each categorical feature of the Criteo Kaggle data set has; ours are cut at MAX_ROWS.
# fmt: off
_CRITEO_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# fmt: on
MAX_ROWS = 10_000
ZIPF_EXPONENT = 1.3
# Some of the tables have bags of 0 to MAX_BAG ids.
MULTI_HOT_TABLES = (0, 6, 10, 14)
MAX_BAG = 6
# Pairs of tables whose ids have an effect together that neither has alone.
INTERACTING_TABLES = ((4, 22), (7, 16), (24, 21), (5, 13))

# The parts of the logit's standard deviation: they set the best reachable AUC, near 0.8 as on click logs.
_DENSE_DEVIATION = 0.5
_IDS_DEVIATION = 1.5
_INTERACTIONS_DEVIATION = 0.2
_BIAS = -1.2

_EFFECTS_STREAM, _TRAINING_STREAM, _HELD_OUT_STREAM = range(3)
# A block of Philox has 4 words of 64 bits, so 8 uniform numbers.
_UNIFORMS_PER_BLOCK = 8
_NUM_SINGLE_HOT = NUM_CATEGORICAL - len(MULTI_HOT_TABLES)
_NUM_UNIFORMS = NUM_DENSE + _NUM_SINGLE_HOT + len(MULTI_HOT_TABLES) * (1 + MAX_BAG) + 1
_BLOCKS_PER_EXAMPLE = -(-_NUM_UNIFORMS // _UNIFORMS_PER_BLOCK)


@attrs.frozen(eq=False)
class _Vocabulary:
    """Random properties of a table, drawn once, rows in the order of popularity.

    Attributes:
        cumulative: [R] probability that the id is among the first so many.
        rows: [R] the row of each: popular ids are strewn over the table, as hashing strews them.
        effects: [R] what an id adds to the logit. Mean 0 and deviation 1 over draws.
        factors: [R] what is multiplied with another table's. Mean 0 and deviation 1 over draws.
    """

    cumulative: NDArray[np.float64]
    rows: NDArray[np.int64]
    effects: NDArray[np.float64]
    factors: NDArray[np.float64]


class GenerativeModel:
    """Draws examples, and knows the probability with which each label was drawn."""

    def __init__(self, seed: int) -> None:
        """Draw what is fixed for the seed: the effects of dense features and ids."""
        self.seed = seed
        self.tables = tuple(
            Table(
                f"cat_{index}",
                min(cardinality, MAX_ROWS),
                mean_bag_size=MAX_BAG / 2 if index in MULTI_HOT_TABLES else 1.0,
            )
            for index, cardinality in enumerate(_CRITEO_CARDINALITIES)
        )
        generator = np.random.default_rng([seed, _EFFECTS_STREAM])
        weights = generator.standard_normal(NUM_DENSE)
        self._dense_weights = weights / np.linalg.norm(weights)
        self._vocabularies = [_vocabulary(generator, table.num_rows) for table in self.tables]

    def training_examples(self, numbers: range) -> Examples:
        """The training examples of these numbers."""
        return self._draw(numbers, _TRAINING_STREAM)

    def held_out_examples(self, numbers: range) -> Examples:
        """The held-out examples of these numbers: other draws of the same model."""
        return self._draw(numbers, _HELD_OUT_STREAM)

    def _draw(self, numbers: range, stream: int) -> Examples:
        columns = iter(self._uniforms(numbers, stream))
        dense = _standard_normal(np.stack([next(columns) for _ in range(NUM_DENSE)], axis=1))
        logits = _BIAS + _DENSE_DEVIATION * self._dense_effects(dense)
        lengths, ids, factors = [], [], {}
        for index, vocabulary in enumerate(self._vocabularies):
            if index in MULTI_HOT_TABLES:
                bags = np.floor(next(columns) * (MAX_BAG + 1)).astype(np.int32)
                draws = np.stack([next(columns) for _ in range(MAX_BAG)], axis=1)
                places = _places(vocabulary, draws)
                inside = np.arange(MAX_BAG) < bags[:, None]
                effects = np.where(inside, vocabulary.effects[places], 0.0).sum(axis=1) / np.sqrt(MAX_BAG / 2)
                places = places[inside]
            else:
                bags = np.ones(len(numbers), dtype=np.int32)
                places = _places(vocabulary, next(columns))
                effects = vocabulary.effects[places]
                factors[index] = vocabulary.factors[places]
            logits += _IDS_DEVIATION / np.sqrt(NUM_CATEGORICAL) * effects
            lengths.append(bags)
            ids.append(vocabulary.rows[places])
        for left, right in INTERACTING_TABLES:
            logits += (
                _INTERACTIONS_DEVIATION / np.sqrt(len(INTERACTING_TABLES)) * factors[left] * factors[right]
            )
        labels = next(columns) < 1.0 / (1.0 + np.exp(-logits))
        return Examples(
            dense=dense.astype(np.float32),
            lengths=np.stack(lengths),
            ids=np.concatenate(ids),
            labels=labels.astype(np.float32),
            true_logits=logits,
        )

    def _uniforms(self, numbers: range, stream: int) -> NDArray[np.float64]:
        """[uniforms of an example, B] numbers in (0, 1), from the examples' places in the sequence."""
        generator = np.random.Philox(key=[self.seed, stream], counter=numbers.start * _BLOCKS_PER_EXAMPLE)
        num_uniforms = _BLOCKS_PER_EXAMPLE * _UNIFORMS_PER_BLOCK
        words = generator.random_raw(len(numbers) * num_uniforms // 2)
        halves = words.astype("<u8").view("<u4")
        by_example = halves.reshape(len(numbers), num_uniforms)
        uniforms: NDArray[np.float64] = (by_example.T + 0.5) / 2.0**32
        return uniforms

    def _dense_effects(self, dense: NDArray[np.float64]) -> NDArray[np.float64]:
        """[B] a bent function of the dense features, deviation near 1."""
        # Summed column by column: a matrix product rounds otherwise in slices of other sizes.
        linear = sum(weight * dense[:, column] for column, weight in enumerate(self._dense_weights))
        bend = (dense[:, 0] ** 2 - 1.0) / np.sqrt(2.0)
        effects: NDArray[np.float64] = 0.8 * linear + 0.6 * bend
        return effects


class SyntheticSource(Source):
    """Endless training batches and a fixed number of held-out examples of one generative model."""

    def __init__(self, seed: int, batch_size: int, num_held_out: int, held_out_batch_size: int) -> None:
        """Name what is to be drawn; it is drawn batch by batch.

        Args:
            seed: Of the generative model and of all draws.
            batch_size: Of the global batch.
            num_held_out: How many examples to evaluate on.
            held_out_batch_size: Of the global batches of these.
        """
        self._batch_size = batch_size
        self._held_out_batch_size = held_out_batch_size
        self._num_held_out = num_held_out
        self._seed = seed

    @property
    def tables(self) -> tuple[Table, ...]:  # type: ignore[override]
        """The tables of the model."""
        return self._model.tables

    def training_batches(self, rank: int, world_size: int) -> Iterator[Examples]:
        """Shares of batch 0, 1, ...: batch `s` is the examples from `s * batch_size` on."""
        part = share(self._batch_size, rank, world_size)
        start = 0
        while True:
            yield self._model.training_examples(range(start + part.start, start + part.stop))
            start += self._batch_size

    def held_out_batches(self, rank: int, world_size: int) -> Iterator[Examples]:
        """Shares of the held-out examples, batch by batch, the last with what is left."""
        for start in range(0, self._num_held_out, self._held_out_batch_size):
            count = min(self._held_out_batch_size, self._num_held_out - start)
            part = share(count, rank, world_size)
            yield self._model.held_out_examples(range(start + part.start, start + part.stop))

    @cached_property
    def _model(self) -> GenerativeModel:
        return GenerativeModel(self._seed)


def _vocabulary(generator: np.random.Generator, num_rows: int) -> _Vocabulary:
    weights = np.arange(1.0, num_rows + 1) ** -ZIPF_EXPONENT
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return _Vocabulary(
        cumulative=np.cumsum(probabilities),
        rows=generator.permutation(num_rows),
        effects=_standardised(generator.standard_normal(num_rows), probabilities),
        factors=_standardised(generator.standard_normal(num_rows), probabilities),
    )


def _standardised(values: NDArray[np.float64], probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values moved and scaled to mean 0 and deviation 1 under the probabilities."""
    centred = values - probabilities @ values
    standardised: NDArray[np.float64] = centred / np.sqrt(probabilities @ centred**2)
    return standardised


def _places(vocabulary: _Vocabulary, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Find the place in the order of popularity that each uniform number draws."""
    places = np.searchsorted(vocabulary.cumulative, uniforms, side="right")
    # The sum of the probabilities is 1 up to rounding only.
    return np.minimum(places, len(vocabulary.cumulative) - 1)


def _standard_normal(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normal numbers from uniform ones, by the inverse of the normal distribution function."""
    import torch

    normal: NDArray[np.float64] = torch.special.ndtri(torch.from_numpy(uniforms)).numpy()
    return normal
