"""Single mutants of source text: a comparison flipped, a number one more, a statement dropped."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@attrs.frozen(order=True)
class Mutant:
    """A span of a file, and the text that replaces it.

    Attributes:
        path: The file, relative to the repository root.
        line: Line of the span's first character, from 1.
        start: Offset of the span's first byte in the file.
        stop: Offset after its last byte.
        text: What stands there instead.
    """

    path: str
    line: int
    start: int
    stop: int
    text: str

    def of(self, source: bytes) -> bytes:
        """Source text of the file with the mutant in it."""
        return source[: self.start] + self.text.encode() + source[self.stop :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """All mutants of a file, in the order of their spans."""
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    found = []
    for node, other in _changes(ast.parse(source)):
        start = begins[node.lineno - 1] + node.col_offset
        stop = begins[node.end_lineno - 1] + node.end_col_offset
        found.append(Mutant(path, node.lineno, start, stop, other))
    return sorted(found)


def draw(root: Path, folders: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """As many mutants as asked of all in the folders' files, the same for a seed and a source text."""
    files = sorted(file for folder in folders for file in _files(root / folder))
    found = [
        mutant for file in files for mutant in mutants_of(str(file.relative_to(root)), file.read_bytes())
    ]
    return sorted(random.Random(seed).sample(found, min(count, len(found))))


def _files(path: Path) -> Iterator[Path]:
    yield from path.rglob("*.py") if path.is_dir() else [path]


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes and the text instead of each; no texts, annotations, decorators or arguments' defaults."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.stmt | ast.expr) and (other := _change(node)) is not None:
        yield node, other
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        children: Iterable[ast.AST] = node.body
    elif isinstance(node, ast.AnnAssign):
        children = [] if node.value is None else [node.value]
    else:
        children = ast.iter_child_nodes(node)
    for child in children:
        yield from _changes(child)


def _change(node: ast.stmt | ast.expr) -> str | None:
    match node:
        case ast.Compare(left, [operator], [right]):
            return f"({ast.unparse(ast.Compare(left, [_OPPOSITE[type(operator)]()], [right]))})"
        case ast.BoolOp(operator, values):
            return f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))})"
        case ast.UnaryOp(ast.Not(), operand):
            return f"({ast.unparse(operand)})"
        case ast.BinOp(left, operator, right) if type(operator) in _ARITHMETIC and not _is_text(left, right):
            return f"({ast.unparse(ast.BinOp(left, _ARITHMETIC[type(operator)](), right))})"
        case ast.Constant(bool() as value):
            return str(not value)
        case ast.Constant(int() as value):
            return str(value + 1)
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            return "return None"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
            return "pass"
    return None


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )
