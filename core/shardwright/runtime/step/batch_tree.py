"""Batches of any form: what is found in them, and others of the same form.

A batch is a tensor, a sparse one, or a mapping, list, tuple or object of such, however deep. Legend: B examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor, nn

from shardwright.runtime.ranks.devices import is_host
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Leaf: TypeAlias = Tensor | KeyedJaggedTensor | JaggedTensor | KeyedTensor

_OPAQUE = (str, bytes, int, float, complex, bool, type, nn.Module, torch.device, torch.dtype)

_LONG = 64
"""A list longer than this that begins with a number or a name holds nothing else: it is not searched in every step."""


@frozen
class Step:
    """From a container to what it holds: an item, or an attribute."""

    key: Any
    is_attribute: bool

    def follow(self, container: Any) -> Any:
        """What the container holds there."""
        return getattr(container, self.key) if self.is_attribute else container[self.key]

    def __str__(self) -> str:
        return f".{self.key}" if self.is_attribute else f"[{self.key!r}]"


Path: TypeAlias = tuple[Step, ...]


def path_text(path: Path) -> str:
    """As one would write it in Python: ``batch.sparse['user']``."""
    return "batch" + "".join(map(str, path))


def follow(batch: Any, path: Path) -> Any:
    """What stands at ``path``.

    Raises:
        LookupError, AttributeError: nothing does; the batch has another form.
    """
    for step in path:
        batch = step.follow(batch)
    return batch


def leaves(batch: Any) -> Iterator[tuple[Path, Leaf]]:
    """Every tensor, sparse or not, in a batch, with its path; in the order of the containers."""
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
    return [(Step(name, True), getattr(value, name)) for name in _attributes(value)]


def _attributes(value: Any) -> list[str]:
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    return [*getattr(value, "__dict__", ()), *slots]


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def mapped(batch: Any, function: Callable[[Leaf], Any]) -> Any:
    """A batch of the same form, each tensor of it replaced; the same object where nothing is."""
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
    """The batch with no examples, but the same form, keys, dtypes and device.

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
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values()[:0].clone(),
        weights=None if weights is None else weights[:0].clone(),
        lengths=features.lengths()[:0].clone(),
        stride=0,
    )


def is_same(one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> bool:
    """Whether two are of the same tensors, not merely equal: ``to`` of the device it is on makes a new object."""
    if one is other:
        return True
    return (
        one.keys() == other.keys()
        and one.values() is other.values()
        and one.weights_or_none() is other.weights_or_none()
        and (
            _is_one(one.lengths_or_none(), other.lengths_or_none())
            or _is_one(one.offsets_or_none(), other.offsets_or_none())
        )
    )


def _is_one(tensor: Tensor | None, other: Tensor | None) -> bool:
    return tensor is not None and tensor is other


def device_of(leaf: Leaf) -> torch.device:
    """Where a tensor, sparse or not, is."""
    return leaf.device if isinstance(leaf, Tensor) else leaf.device()


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``; from page-locked memory, so that nobody waits for the copies.

    A batch with a ``to`` of its own is moved by that.
    """
    if all(device_of(leaf) == device for _, leaf in leaves(batch)):
        return batch
    if not isinstance(batch, Leaf) and callable(getattr(batch, "to", None)):
        pin = getattr(batch, "pin_memory", None)
        return (pin() if pin is not None and not is_host(device) else batch).to(device, non_blocking=True)
    return mapped(batch, lambda leaf: _moved_leaf(leaf, device))


def _moved_leaf(leaf: Leaf, device: torch.device) -> Leaf:
    if device_of(leaf) == device:
        return leaf
    if is_host(device_of(leaf)) and not isinstance(leaf, KeyedTensor):
        leaf = leaf.pin_memory()  # which is itself where it is pinned
    return leaf.to(device, non_blocking=True)


def record_stream(batch: Any, stream: torch.Stream) -> None:
    """Keep the memory of a batch from being reused until what ``stream`` does with it is done."""
    for _, leaf in leaves(batch):
        leaf.record_stream(stream)
