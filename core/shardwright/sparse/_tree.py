"""Registration of the sparse types as pytrees, so that `tree_map` and the like see their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree

_T = TypeVar("_T")

# What the leaves are called in key paths, in the order in which all types give them.
_LEAF_NAMES = ("values", "lengths", "weights")


def register(
    cls: type[_T],
    flatten: Callable[[_T], tuple[list[Tensor], list[Any]]],
    unflatten: Callable[[Any, list[Any]], _T],
    names: Callable[[_T], list[str]] | None = None,
) -> None:
    """Register one type.

    Args:
        cls: The type.
        flatten: To tensors (values; then lengths; then weights, as far as there are any) and a context, which
            is a list of what JSON knows, so that it survives serialisation.
        unflatten: Back. It must not check: what comes back need not be tensors.
        names: Name of each leaf in key paths; by default values, lengths, weights.
    """

    def flatten_with_keys(instance: _T) -> tuple[list[tuple[Any, Tensor]], list[Any]]:
        leaves, context = flatten(instance)
        own = _LEAF_NAMES[: len(leaves)] if names is None else names(instance)
        return [(_pytree.GetAttrKey(name), leaf) for name, leaf in zip(own, leaves, strict=True)], context

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"shardwright.sparse.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
