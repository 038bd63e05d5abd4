"""Batches of any form: searching them for tensors, and making others of the same form.

A batch is a tensor, dense or sparse, or a mapping, list, tuple or object of batches. Legend: B examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn

from shardwright.runtime.ranks.devices import has_streams, is_host
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Leaf: TypeAlias = Tensor | KeyedJaggedTensor | JaggedTensor | KeyedTensor

_OPAQUE = (str, bytes, int, float, complex, bool, type, nn.Module, torch.device, torch.dtype)

_LONG = 64
"""Length above which a list that begins with a number or a string is taken to hold no tensor, and is not searched."""


@frozen
class Step:
    """One step of a path: the key of an item, or the name of an attribute."""

    key: Any
    is_attribute: bool

    def follow(self, container: Any) -> Any:
        """Read the item or attribute from a container."""
        return getattr(container, self.key) if self.is_attribute else container[self.key]

    def __str__(self) -> str:
        return f".{self.key}" if self.is_attribute else f"[{self.key!r}]"


Path: TypeAlias = tuple[Step, ...]


def path_text(path: Path) -> str:
    """Spell a path as a Python expression: ``batch.sparse['user']``."""
    return "batch" + "".join(map(str, path))


def follow(batch: Any, path: Path) -> Any:
    """Read the part of a batch that stands at ``path``.

    Raises:
        LookupError, AttributeError: nothing stands there, because the batch has another form.
    """
    for step in path:
        batch = step.follow(batch)
    return batch


def leaves(batch: Any) -> Iterator[tuple[Path, Leaf]]:
    """Yield each tensor of a batch, dense or sparse, with its path, in the order of the containers."""
    return _leaves(batch, (), ())


def _leaves(value: Any, path: Path, above: tuple[int, ...]) -> Iterator[tuple[Path, Leaf]]:
    if isinstance(value, Leaf):
        yield path, value
    elif id(value) not in above:  # objects may refer to what holds them
        for step, child in _children(value):
            yield from _leaves(child, (*path, step), (*above, id(value)))


def _children(value: Any) -> list[tuple[Step, Any]]:
    if value is None or isinstance(value, _OPAQUE) or callable(value):
        return []
    if isinstance(value, MutableMapping):
        return [(Step(key, False), child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        if len(value) > _LONG and isinstance(value[0], _OPAQUE):
            return []
        return [(Step(index, False), child) for index, child in enumerate(value)]
    return [(Step(name, True), getattr(value, name)) for name in attributes(value)]


def attributes(value: Any) -> list[str]:
    """Names of the attributes that an object holds itself, in slots too."""
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    return [*getattr(value, "__dict__", ()), *slots]


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def mapped(batch: Any, function: Callable[[Leaf], Any]) -> Any:
    """Replace each tensor of a batch by ``function`` of it; the batch itself is returned if none changes."""
    if isinstance(batch, Leaf):
        return function(batch)
    old = _children(batch)
    new = [(step, mapped(child, function)) for step, child in old]
    if all(child is before for (_, child), (_, before) in zip(new, old, strict=True)):
        return batch
    if isinstance(batch, tuple):
        values = [child for _, child in new]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return _with_children(batch, new)


def _with_children(container: Any, children: list[tuple[Step, Any]]) -> Any:
    changed = copy.copy(container)
    for step, child in children:
        if step.is_attribute:
            object.__setattr__(changed, step.key, child)  # frozen classes too
        else:
            changed[step.key] = child
    return changed


def without_examples(batch: Any) -> Any:
    """Make a batch without examples, of the same form, keys, dtypes and device.

    Tensors whose first dimension is B become ``[0, ...]``, sparse ones lose their bags; all else stays.
    """
    sizes = {leaf.stride() for _, leaf in leaves(batch) if isinstance(leaf, KeyedJaggedTensor)}

    def emptied(leaf: Leaf) -> Any:
        if isinstance(leaf, KeyedJaggedTensor):
            return _no_bags(leaf)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] in sizes:
            return leaf[:0].clone()
        return leaf

    return mapped(batch, emptied)


def _no_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[:0].clone(),
        columns={name: column[:0].clone() for name, column in features.columns().items()},
        lengths=features.lengths()[:0].clone(),
        stride=0,
    )


def is_same(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    """Tell whether two objects share the same tensors; ``to`` may have made a new object of them."""
    if one is other:
        return True
    return (
        one.keys() == other.keys()
        and one.values() is other.values()
        and one.columns().keys() == other.columns().keys()
        and all(column is other.columns()[name] for name, column in one.columns().items())
        and (
            _is_one(one.lengths_or_none(), other.lengths_or_none())
            or _is_one(one.offsets_or_none(), other.offsets_or_none())
        )
    )


def path_of(batch: Any, features: KeyedJaggedTensor) -> Path | None:
    """The place in a batch of features that share their tensors with it; ``None`` if it has none."""
    for path, leaf in leaves(batch):
        if isinstance(leaf, KeyedJaggedTensor) and is_same(leaf, features):
            return path
    return None


def _is_one(tensor: Tensor | None, other: Tensor | None) -> bool:
    return tensor is not None and tensor is other


def device_of(leaf: Leaf) -> torch.device:
    """The device of a tensor, dense or sparse."""
    return leaf.device if isinstance(leaf, Tensor) else leaf.device()


def moved(batch: Any, device: torch.device) -> Any:
    """Copy a batch to ``device``, from page-locked memory, so that the host does not wait for the copies.

    A batch with a ``to`` method is moved by that method.
    """
    if all(device_of(leaf) == device for _, leaf in leaves(batch)):
        return batch
    if not isinstance(batch, Leaf) and callable(getattr(batch, "to", None)):
        pin = getattr(batch, "pin_memory", None)
        return (pin() if pin is not None and has_streams(device) else batch).to(device, non_blocking=True)
    return mapped(batch, lambda leaf: _moved_leaf(leaf, device))


def _moved_leaf(leaf: Leaf, device: torch.device) -> Leaf:
    if device_of(leaf) == device:
        return leaf
    if has_streams(device) and is_host(device_of(leaf)) and not isinstance(leaf, KeyedTensor):
        leaf = leaf.pin_memory()  # which is itself where it is pinned
    return leaf.to(device, non_blocking=True)


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Keep a batch's memory on a device from being reused until what ``stream`` does with it is done.

    Tensors of the host belong to no stream, and are passed over.
    """
    for _, leaf in leaves(batch):
        if not is_host(device_of(leaf)):
            leaf.record_stream(stream)
