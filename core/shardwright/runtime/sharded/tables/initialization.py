"""Initial weights that do not depend on the plan.

A table that is drawn evenly gets each value from its row and column, by a hash, so that a rank makes those of its own
blocks and no others. Where the user gave an ``init_fn``, each run of rows has a generator of its own and is made whole.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardwright.errors import UnsupportedError
from shardwright.modules.embedding_configs import dtype_of
from shardwright.modules.table_collection import TableCollection
from shardwright.planning.layouts.layout import Block
from shardwright.planning.layouts.stored_rows import rows_between
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import EmbeddingConfig
from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.ranks.environment import ShardingEnv

_CHUNK_ELEMENTS = 1 << 20
_HASHED_AT_ONCE = 1 << 16  # elements, which a near cache holds
_MASK = (1 << 63) - 1


def initialize(weights: Tensor, config: EmbeddingConfig, block: Block, *, path: str, seed: int) -> None:
    """Fill a block's weights.

    Args:
        weights: ``[rows, columns]`` of the block, filled in place.
        config: its table; an ``init_fn`` is called once for each run of rows ``[run, embedding_dim]`` (one run
            for tables of up to 2^20 elements).
        block: rows and columns of the block.
        path: path of the table in the model, so that tables differ.
        seed: seed of the model, the same on all ranks.
    """
    if config.init_fn is None:
        _fill_evenly(weights, config, block, key=_mix(seed, path, 0))
        return
    columns = slice(block.columns.start, block.columns.stop)
    rows, num_rows = block.rows.rows, config.num_embeddings
    order = None if isinstance(rows, slice) else np.argsort(rows)  # so that rows of each run stand together
    rows = rows if order is None else np.asarray(rows)[order]
    rising = range(num_rows)[rows] if isinstance(rows, slice) else rows  # a range takes no memory
    for number, start, stop in _chunks(config):
        first, last = bisect_left(rising, start), bisect_left(rising, stop)
        if first < last:
            values = _chunk(config, stop - start, seed=_mix(seed, path, number))
            chosen = values[rows_between(rows, first, last, num_rows) - start, columns]
            places = slice(first, last) if order is None else order[first:last]
            weights[places] = chosen.to(weights.device, weights.dtype)


def _fill_evenly(weights: Tensor, config: EmbeddingConfig, block: Block, *, key: int) -> None:
    """Fill a block with values drawn evenly from the table's range."""
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    rows = block.rows.rows
    columns = np.arange(block.columns.start, block.columns.stop, dtype=np.uint32)
    at_once = max(1, _HASHED_AT_ONCE // len(columns))
    for start in range(0, block.num_rows, at_once):
        stop = min(start + at_once, block.num_rows)
        own = rows_between(rows, start, stop, config.num_embeddings).astype(np.uint64)
        values = torch.from_numpy(hashed(key, own, columns)).mul_(high - low).add_(low)
        weights[start:stop] = values.clamp_(low, high).to(weights.device, weights.dtype)


def hashed(
    key: int, rows: npt.NDArray[np.uint64], columns: npt.NDArray[np.uint32]
) -> npt.NDArray[np.float32]:
    """Numbers from 0 to below 1 that follow from a key, a row and a column: ``[rows, columns]``.

    Each row's 64 bits are the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014) of key and row; each value is 24 bits of two rounds of MurmurHash3's 32-bit finalizer (Appleby,
    public domain) over the column, keyed with one half of these and then with the other.
    """
    with np.errstate(over="ignore"):
        # 64 bits for each row: SplitMix64's state after ``row`` steps from ``key``, then its finalizer.
        row = rows * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        row = (row ^ row >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        row = (row ^ row >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        row ^= row >> np.uint64(31)
        low, high = ((row >> np.uint64(shift)).astype(np.uint32)[:, None] for shift in (0, 32))
        values = _finished(_finished(columns * np.uint32(0x9E3779B1) ^ low) ^ high)
    # The upper 24 bits, as many as a float32 has in its mantissa: evenly spaced in [0, 1).
    values >>= np.uint32(8)
    return values.astype(np.float32) * np.float32(2.0**-24)


def _finished(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's 32-bit finalizer, in place."""
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values


def _chunks(config: EmbeddingConfig) -> Iterator[tuple[int, int, int]]:
    """Number, first row and row after the last of each run."""
    size = max(1, _CHUNK_ELEMENTS // config.embedding_dim)
    for number, start in enumerate(range(0, config.num_embeddings, size)):
        yield number, start, min(start + size, config.num_embeddings)


def _chunk(config: EmbeddingConfig, num_rows: int, *, seed: int) -> Tensor:
    """A run of rows as the user's function makes it."""
    assert config.init_fn is not None  # others are drawn evenly
    values = torch.empty(num_rows, config.embedding_dim, dtype=dtype_of(config.data_type))
    with seeded(seed), torch.no_grad():
        config.init_fn(values)
    return values


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """A context with random numbers from ``seed``; after it all generators are as they were before.

    It does not use ``torch.manual_seed``, which seeds the generators of all accelerators for good: every rank would
    then drop out the same elements.

    Args:
        seed: seed of the CPU's generator and, if a device is given, of that device's.
        device: accelerator whose generator is seeded too.
    """
    if device is None or is_host(device):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    with (
        torch.random.fork_rng(devices=[index], device_type=device.type),
        torch.accelerator.device_index(index),
    ):
        torch.default_generator.manual_seed(seed)
        torch.get_device_module(device).manual_seed(seed)
        yield


def _mix(seed: int, path: str, number: int) -> int:
    """A seed for one run of one table (CRC-32 of the three; any good hash would do)."""
    low = zlib.crc32(f"{seed}/{path}/{number}".encode())
    high = zlib.crc32(f"{number}/{path}/{seed}".encode())
    return (high << 32 | low) & _MASK


def initialise(
    model: nn.Module, sharded: Mapping[str, nn.Module], env: ShardingEnv, device: torch.device
) -> None:
    """Allocate and initialise what is on ``meta``, from rank 0's seed; move the rest to the device.

    Args:
        model: the model.
        sharded: the sharded modules by their paths, which are left as they are.
        env: the ranks.
        device: this rank's device.

    Raises:
        UnsupportedError: a module on ``meta`` has no ``reset_parameters``.
    """
    seed = env.everyone.communicator.broadcast_object(torch.initial_seed())
    own = [path + "." if path else "" for path in sharded]
    tied = _shared_parameters(model)
    with seeded(seed, device):
        for path, child in model.named_modules():
            if not any((path + ".").startswith(prefix) for prefix in own):
                _initialise_if_meta(path, child, device)
    for (first, name), *others in tied:
        for holder, other in others:
            setattr(holder, other, getattr(first, name))
    model.to(device)


def _shared_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each parameter that stands in more than one; materialising would tear them apart."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    return [own for own in places.values() if len(own) > 1]


def _initialise_if_meta(path: str, module: nn.Module, device: torch.device) -> None:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not any(tensor.is_meta for tensor in tensors):
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UnsupportedError(
            f"{type(module).__name__} at {path!r} is on 'meta' and has no reset_parameters() to initialise it: "
            "build it on a real device, or add that method"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def check_first_values(module: TableCollection, params: Mapping[str, ParameterSharding]) -> None:
    """Check that no table of keys asks for first values of its own: rows of keys are born later, by their kernel."""
    for config in module.tables:
        asked = [
            name
            for name in ("weight_init_min", "weight_init_max", "init_fn")
            if getattr(config, name) is not None
        ]
        if asked and params[config.name].layout.row_map.takes_any_id:
            raise UnsupportedError(
                f"table {config.name!r} has {' and '.join(asked)}, and its ids are keys, whose rows begin with values "
                f"that its compute kernel draws: leave {' and '.join(asked)} out, or take a sharding type of rows"
            )
