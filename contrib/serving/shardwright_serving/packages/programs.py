"""The forms of a program: `torch.export`'s, compiled by AOTInductor, and TorchScript.

All are made from one exported graph. TorchScript, which torch has deprecated, is written from its operators.

Legend: F features, B samples, N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config

from shardwright import InvalidInputError, UnsupportedError
from shardwright_serving.packages.loading import quiet
from shardwright_serving.packages.program import ServingProgram

MOST_IDS = 2**31 - 1
"""Largest number of ids of a batch, which some of torch's operators count in 32 bits."""


def exported(program: ServingProgram, example: Mapping[str, Tensor], rows: Tensor, num_features: int) -> Any:
    """Export a program for any numbers of samples and ids, none and one among them.

    Args:
        program: the program.
        example: its inputs but the rows, by name.
        rows: the mapped rows.
        num_features: F.

    Raises:
        UnsupportedError: torch cannot trace the model, or not for any number of samples.
    """
    batch, ids = torch.export.Dim("batch"), torch.export.Dim("ids", max=MOST_IDS)
    sizes = {"values": ids, "lengths": batch if num_features == 1 else num_features * batch}
    sizes |= {"weights": ids, "dense": batch}
    shapes = tuple([*({0: sizes[name]} for name in example), None])
    # Sizes of 0 and 1 are not told from others, so that one program serves them too.
    with torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        try:
            made = torch.export.export(
                program, (*example.values(), rows), dynamic_shapes=(shapes,), strict=False
            )
        except Exception as error:  # whatever a user's model raises when it is traced
            raise UnsupportedError(
                f"torch.export cannot trace {type(program.model).__name__}.forward for any number of samples: {error}"
            ) from error
    return made


def _write_exported(made: Any, path: Path) -> None:
    example, made.example_inputs = made.example_inputs, None  # it would be stored, the rows with it
    try:
        torch.export.save(made, path)
    finally:
        made.example_inputs = example


def _write_compiled(made: Any, path: Path) -> None:
    try:
        with quiet(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            torch._inductor.aoti_compile_and_package(made, package_path=str(path))
    except Exception as error:  # the compiler's, and those of torch that know no better class
        raise UnsupportedError(
            f"AOTInductor cannot compile the program: {error}. Leave the form 'pt2' out, or install a C++ compiler"
        ) from error


def _write_script(made: Any, path: Path) -> None:
    with quiet():
        torch.jit.save(torch.jit.script(_scriptable(made)), path)


_NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""Numbers that a program reads from tensors, and the functions that read them in TorchScript."""


def _scriptable(made: Any) -> nn.Module:
    """The exported graph with operators that TorchScript resolves: by name, without an overload."""
    module = made.module(check_guards=False)
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _CHECKS:
            graph.erase_node(node)  # operators check what these do
        elif node.target is torch.ops.aten.item.default:
            node.target = _NUMBERS[type(node.meta["val"])]
        elif isinstance(node.target, torch._ops.OpOverload):
            _call_by_name(node)
    graph.eliminate_dead_code()
    graph.set_codegen(torch.fx.graph.CodeGen())
    return torch.fx.GraphModule(module, graph)


_CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_tensor_metadata.default)


def _call_by_name(node: torch.fx.Node) -> None:
    """Call an operator by its name alone, with the names of its arguments, which tell its overloads apart."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    node.kwargs = {**dict(zip(names[1:], node.args[1:], strict=False)), **node.kwargs}
    node.args = node.args[:1]
    # TorchScript has no name for views as another dtype, only for copies of them.
    is_cast = node.target is torch.ops.aten.view.dtype
    node.target = torch.ops.aten.view_copy if is_cast else node.target.overloadpacket


writers: Mapping[str, Callable[[Any, Path], None]] = {
    "exported": _write_exported,
    "pt2": _write_compiled,
    "torchscript": _write_script,
}
"""Form -> function that writes it from the exported program."""


def check_forms(forms: Sequence[str]) -> None:
    """Check that forms are known.

    Raises:
        InvalidInputError: one is not, or there are none.
    """
    wrong = [form for form in forms if form not in writers]
    if wrong or not forms or isinstance(forms, str):
        raise InvalidInputError(f"forms are some of {', '.join(writers)}, got {forms!r}")
