"""Every place in fedhet/ where a small mistake can be made, and a seeded draw among them."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
PAIRS = ((ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn))
OPPOSITE = {a: b for pair in (*PAIRS, (ast.Is, ast.IsNot)) for a, b in (pair, pair[::-1])}
KINDS = ("sign", "comparison", "off by one", "swapped arguments", "removed check")


@dataclass(frozen=True)
class Mutant:
    """One changed expression.

    Attributes:
        path: the file, relative to the root of the repository.
        line: its line, from 1.
        kind: one of KINDS.
        before: the source of the expression.
        after: what is written in its place.
        start: the offset of the first byte of `before` in the file.
        statement: (line, column) of the statement inside a function that has the expression; None
            for what runs when the module is imported.
    """

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    statement: tuple[int, int] | None

    def apply(self, root: Path) -> None:
        """Write the mutant into the copy of the repository at `root`."""
        file = root / self.path
        source = file.read_bytes()
        end = self.start + len(self.before.encode())
        file.write_bytes(source[: self.start] + self.after.encode() + source[end:])

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.path}:{self.line}: {self.kind}: {before}  ->  {after}"


def draw(root: Path, seed: int, n: int) -> list[Mutant]:
    """Draw n mutants: for each first a kind, then one of its places in fedhet/."""
    places: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for file in sorted(root.glob("fedhet/**/*.py")):
        for mutant in mutants(file.read_text(), file.relative_to(root).as_posix()):
            places[mutant.kind].append(mutant)
    stream = random.Random(seed)
    drawn: list[Mutant] = []
    while len(drawn) < n:
        mutant = stream.choice(places[stream.choice(KINDS)])
        if mutant not in drawn:
            drawn.append(mutant)
    return drawn


def mutants(source: str, path: str) -> Iterator[Mutant]:
    """All mutants of one file, in the order of its lines."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node, statement in _nodes(ast.parse(source), None):
        for kind, at, after in _changes(node):
            start = lines[at.lineno - 1] + at.col_offset
            end = lines[(at.end_lineno or 0) - 1] + (at.end_col_offset or 0)
            before = source.encode()[start:end].decode()
            yield Mutant(path, at.lineno, kind, before, after, start, statement)


Place = tuple[int, int] | None


def _nodes(
    node: ast.AST, statement: Place, inside: bool = False
) -> Iterator[tuple[ast.AST, Place]]:
    """All nodes that run, each with the statement of a function that it belongs to."""
    yield node, statement
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue  # before Python 3.12, positions in f-strings are not those of the file
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            within = inside or (function and field == "body")
            own = statement
            alone = isinstance(node, ast.If) and field == "orelse" and len(node.orelse) == 1
            if within and isinstance(child, ast.stmt) and not (alone and isinstance(child, ast.If)):
                own = (child.lineno, child.col_offset)
                if isinstance(child, ast.FunctionDef | ast.ClassDef) and child.decorator_list:
                    own = (child.decorator_list[0].lineno, child.col_offset)
            yield from _nodes(child, own if within else None, within)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(kind, the node that is replaced, what replaces it) of the mistakes at one node."""
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _text(node.left) | _text(node.right):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield "sign", node, _with(node, op=other)
        case ast.AugAssign(op=ast.Add() | ast.Sub()) if not _text(node.value):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            yield "sign", node, ast.unparse(_changed(node, op=other))
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", node, ast.unparse(node.operand)
        case ast.Compare(ops=[op]):
            yield "comparison", node, _with(node, ops=[OPPOSITE[type(op)]()])
            if type(op) in SHIFTED:
                yield "off by one", node, _with(node, ops=[SHIFTED[type(op)]()])
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            yield "off by one", node, str(node.value + 1)
        case ast.Call(args=[first, second, *rest]) if ast.dump(first) != ast.dump(second):
            if not any(isinstance(one, ast.Starred) for one in (first, second)):
                yield "swapped arguments", node, _with(node, args=[second, first, *rest])
        case ast.If(body=[*_, ast.Raise()]):
            yield "removed check", node.test, "False"
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))) if (
            name.lstrip("_").startswith(("check", "refuse", "require"))
        ):
            yield "removed check", node, "pass"


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _with(node: ast.expr, **fields: object) -> str:
    text = ast.unparse(_changed(node, **fields))
    return text if isinstance(node, ast.Call) else f"({text})"
