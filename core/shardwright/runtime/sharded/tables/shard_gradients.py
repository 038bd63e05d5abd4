"""Gradients of sharded tables, of which each rank has a part, as tensors that know it.

Whoever calls an operation gets the unsharded module's result: torch's clipping, a gradient scaler, a training
framework, a line of the user's own. What is done to each element is done here. A norm, a sum or a greatest element of
the whole is taken over all ranks, which all come to this line, since each has as many parameters of a table: by
extensions at the point ``gradients``. All else would give each rank another result, and is refused by name.

Legend: U rows of a block that have a gradient, D columns of a block, C columns of its gradient (D, or those of the
whole table where the kernel needs whole rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwright.error_reports import reporting_errors
from shardwright.errors import DuplicateNameError, UnsupportedError
from shardwright.host.extensions import ask_at, words_at
from shardwright.host.plugin_host import host
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.backward.kept_gradients import KeptGradients
from shardwright.runtime.step.step_events import StepEvents

_REMAIN_SPARSE = frozenset(
    (
        "abs",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clone",
        "div",
        "isinf",
        "isnan",
        "mul",
        "nan_to_num",
        "neg",
        "pow",
    )
) | {"sign", "sqrt", "square", "_to_copy"}
"""Operations that leave rows without a gradient at 0, for the arguments with which gradients are clipped and scaled."""
_NOT_BY_ELEMENT = frozenset({"max", "mm", "norm", "powsum"})
"""Operations of several tensors, called ``_foreach_...``, that are not on each element."""
_LOCAL = frozenset({"copy", "detach", "fill", "zero", "_to_copy"})
"""Operations on each element that torch does not tag as such."""


@frozen(eq=False)
class Part:
    """The table that a parameter, and its gradient, is a part of.

    Args:
        table: description of the table.
        env: the ranks that it is sharded over.
        events: events of its collection.
        cut_dims: dimensions along which the table is cut, 0 for rows and 1 for columns.
        update: when the kernel's optimizer runs, "in_backward" or "in_step"; empty: the gradient is left to others.
        num_copies: ranks that have the same block with the same gradient.
        kept: the lookup that keeps the gradient for the optimizer's step, if one does.
        block: number of the block in that lookup.
        is_idle: it stands in the place of a block that other ranks have, and is empty.
    """

    table: str
    env: ShardingEnv
    events: StepEvents
    cut_dims: tuple[int, ...] = ()
    update: str = ""
    num_copies: int = 1
    kept: KeptGradients | None = None
    block: int = 0
    is_idle: bool = False


class ShardGradient(torch.Tensor):
    """The gradient of this rank's block of a table.

    Args:
        part: the table, and how it is a part of it.
        local: its elements here: ``[rows, D]``, or ``[U, D]`` with ``rows``; shared storage.
        shape: shape of the block.
        rows: the rows that have a gradient, ``[U]``, rising; ``None``: all have.
        whole: ``local`` with columns of other ranks beside, ``[U, C]``, on which in-place operations are done.
    """

    part: Part
    local: Tensor
    rows: Tensor | None
    whole: Tensor

    @staticmethod
    def __new__(  # noqa: D102 - described by its class
        cls: type[ShardGradient],
        part: Part,
        local: Tensor,
        shape: Sequence[int] | None = None,
        rows: Tensor | None = None,
        whole: Tensor | None = None,
    ) -> ShardGradient:
        size = torch.Size(local.shape if shape is None else shape)
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=local.dtype, device=local.device)
        made.part, made.local, made.rows = part, local, rows
        made.whole = local if whole is None else whole
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch does

    def to_local(self) -> Tensor:
        """This rank's elements alone, a plain tensor of shared storage; of a sparse gradient its rows'."""
        return self.local

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]  # torch has an attribute
        """True if only some rows have a gradient: those of :meth:`indices`."""
        return self.rows is not None

    def coalesce(self) -> ShardGradient:
        """The same tensor."""
        return self

    def indices(self) -> Tensor:
        """The rows of this rank's block that have a gradient, ``[1, U]``."""
        if self.rows is None:
            self.refuse("indices()")
        return self.rows[None]

    def values(self) -> ShardGradient:
        """The gradients of these rows, ``[U, D]``, shared storage."""
        return ShardGradient(self.part, self.local, whole=self.whole)

    _indices, _values = indices, values  # as torch.amp.GradScaler calls them

    def to_dense(self, *_: Any, **__: Any) -> ShardGradient:
        """The gradient of all rows of the block: a copy where only some have one."""
        if self.rows is None:
            return self
        dense = self.local.new_zeros(self.shape).index_copy_(0, self.rows, self.local)
        return ShardGradient(self.part, dense)

    def refuse(self, operation: str) -> NoReturn:
        """Refuse an operation.

        Raises:
            UnsupportedError: always; on all ranks, since all do the same.
        """
        with reporting_errors():
            raise UnsupportedError(
                f"{operation} of the gradient of table {self.part.table}, of which each rank has a part"
                f"{', of the rows that have a gradient' * (self.rows is not None)}: each rank would have another "
                "result. Norms, sums, means and extremes of the whole gradient are over all ranks, and elements may be "
                "scaled or clamped in place; coalesce().values() are those of a sparse one, and to_local() is this "
                "rank's part as a plain tensor. shardwright.clip_grad_norm_ clips all parameters by one norm. Tables "
                "with update='in_step' are updated by fused_optimizer.step(), by no other optimizer."
                f"{host().extensions.not_loaded}"
            )

    def full_tensor(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to give a part for the whole, as to histograms, or the whole, which a rank may have no memory for.

        Raises:
            UnsupportedError: always.
        """
        self.refuse("numpy(), tolist() or full_tensor()")

    numpy = tolist = __array__ = full_tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardGradient(table {self.part.table}, here: {self.local!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, AppliedGradient) for each in types):
            return NotImplemented
        return _by_element(func, name_of(func), args, kwargs or {})


class AppliedGradient(torch.Tensor):
    """The gradient that a parameter of a table shows after the backward pass that has applied it.

    It has no elements. It can be set to zero, which does nothing; whatever else reads it is refused.

    Args:
        refusal: the reason, and what to do.
        parameter: the parameter.
    """

    refusal: str

    @staticmethod
    def __new__(  # noqa: D102 - described by its class
        cls: type[AppliedGradient], refusal: str, parameter: Tensor
    ) -> AppliedGradient:
        made = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.refusal = refusal
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch does

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "AppliedGradient()"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, given = name_of(func), tree_flatten((args, kwargs))[0]
        applied = next(each for each in given if isinstance(each, AppliedGradient))
        if name in ("zero_", "detach_", "detach"):
            return applied
        if name == "_foreach_zero_":
            for each in args[0]:
                each.zero_()
            return None
        with reporting_errors():
            raise UnsupportedError(f"{name}() {applied.refusal}")


def name_of(func: Any) -> str:
    """The name of an operator, without its namespace and overload."""
    name: str = func.name()
    return name.rpartition("::")[2].partition(".")[0]


def _by_element(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Do to each element what torch does to each; all else is a plugin's work over all ranks, or refused."""
    given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    own = next(each for each in given if isinstance(each, ShardGradient))
    plain, is_many = name.removeprefix("_foreach_").rstrip("_"), name.startswith("_foreach_")
    if plain == "detach":
        return ShardGradient(own.part, own.local, own.shape, own.rows, own.whole)
    is_in_place = name.endswith("_")  # as torch names them; it has no tag of them before 2.13
    is_local = (
        (is_many and plain not in _NOT_BY_ELEMENT) or torch.Tag.pointwise in func.tags or plain in _LOCAL
    )
    if not is_local:
        offered, gives = host().extensions, Mapping[str, Callable[..., Any]]
        told = {
            word: ask_at("gradients", word, offered, gives).get(name)
            for word in words_at("gradients", offered)
        }
        brought = {bringing: word for word, bringing in told.items() if bringing is not None}
        if len(brought) > 1:
            raise DuplicateNameError(
                f"{name}() of gradients of sharded tables is brought by several extensions at the point 'gradients', "
                f"otherwise by each: {', '.join(brought.values())}. Turn all but one off (SHARDWRIGHT_PLUGINS)"
            )
        for over_ranks in brought:
            return over_ranks(func, name, args, kwargs)
    if not is_local or any(_misses_rows(each, given, plain, is_in_place, is_many) for each in given):
        own.refuse(f"{name}()")
    if not is_in_place:
        made = func(*_local_of(args), **_local_of(kwargs))
        if not is_many:
            return made if kwargs.get("out") is made else _like(made, given, name)
        lists = [each for each in args if isinstance(each, list | tuple)]
        return [_like(result, entries, name) for result, *entries in zip(made, *lists, strict=True)]
    if plain == "zero":
        for each in args[0] if is_many else args[:1]:
            _set_to_zero(each)
    else:
        changed = tree_map_only(ShardGradient, lambda each: each.whole, args[0])
        func(changed, *_local_of(args[1:]), **_local_of(kwargs))
    return None if is_many else args[0]


def _local_of(values: Any) -> Any:
    return tree_map_only(ShardGradient, lambda each: each.local, values)


def _set_to_zero(gradient: Tensor) -> None:
    if not isinstance(gradient, ShardGradient):
        gradient.zero_()
    elif gradient.rows is not None and gradient.part.kept is not None:
        gradient.part.kept.empty(gradient.part.block)
    else:
        gradient.whole.zero_()


def _misses_rows(own: Tensor, given: Sequence[Tensor], plain: str, is_in_place: bool, is_many: bool) -> bool:
    """Tell if rows without a gradient, or the columns beside this rank's, would have to be known."""
    if not isinstance(own, ShardGradient) or (
        own.rows is None and (own.whole is own.local or not is_in_place)
    ):
        return False
    others = [each for each in given if each is not own and each.dim()]
    return plain not in _REMAIN_SPARSE | {"zero"} or (bool(others) and not is_many)


def _like(result: Tensor, given: Sequence[Any], name: str) -> Tensor:
    """The result of what was done to each element of a gradient, as a gradient of the same part."""
    sharded = [each for each in given if isinstance(each, ShardGradient)]
    if not sharded:
        return result
    own = sharded[0]
    if result.shape != own.local.shape or any(each.part is not own.part for each in sharded):
        own.refuse(f"{name}()")
    return ShardGradient(own.part, result, own.shape if own.rows is not None else None, own.rows)
