"""`Fingerprint`: what a target looks like in its source file, read without importing it.

The hash covers the definition's source, decorators and signature included, minus comments,
docstrings and blank lines. Of indentation it keeps how deep a statement is nested in the definition:
not how wide a level is, not the definition's own column, not how a statement's further lines are
aligned. It is taken from the text, not from the syntax tree: `ast.dump` and `ast.unparse` differ
between Python 3.10 and 3.13 for the same source, the text does not.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from afd_shim.engine.target import Target

__all__ = ["ABSENT", "Fingerprint", "SourceTree"]

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.AugAssign

#: Kind of a target that its source does not define.
ABSENT = "absent"
#: Kind of a target that its module only imports from elsewhere: it has moved.
IMPORTED = "import"

# String literals first, so that a '#' inside one is not taken for a comment.
_TOKEN = re.compile(
    rb'(?P<string>"""(?:\\.|[^\\])*?"""|'
    rb"'''(?:\\.|[^\\])*?'''|"
    rb'"(?:\\.|[^"\\\n])*"|'
    rb"'(?:\\.|[^'\\\n])*')"
    rb"|(?P<open>[(\[{])|(?P<close>[)\]}])"
    rb"|(?P<continuation>\\\n[ \t\r\f]*)"
    # A line's end, with the comment before it and the blank and comment lines after it.
    rb"|(?P<newline>[ \t\r]*(?:#[^\n]*)?\n(?:[ \t\r\f]*(?:#[^\n]*)?\n)*(?P<indent>[ \t\r\f]*))",
    re.DOTALL,
)
# What separates a docstring from a statement on the same line.
_SEPARATOR = re.compile(rb"[ \t]*;[ \t]*")


@final
@dataclass(frozen=True)
class Fingerprint:
    """One target's shape at one release."""

    #: A `Kind`, or "absent", or "import" (the module only re-exports it now).
    kind: str
    #: A function's parameter names in order ("name=" has a default, "*", "/", "**kwargs");
    #: a class' bases.
    parameters: str = ""
    #: 16 hex digits of the SHA-256 of the normalised source.
    source: str = ""
    #: A class' functions, each "name:hash", so that a difference can be named.
    members: tuple[str, ...] = ()
    #: For an absent target, the names most like it in the same scope. Not compared.
    similar: tuple[str, ...] = field(default=(), compare=False)

    def difference(self, actual: Fingerprint) -> str:
        """Say in one sentence how `actual` differs from this expectation; empty when it does not."""
        if actual == self:
            return ""
        if actual.kind == ABSENT:
            like = f"; similar: {', '.join(actual.similar)}" if actual.similar else ""
            return f"it is gone (expected a {self.kind}{like})"
        if actual.kind == IMPORTED:
            return f"it has moved: the module now imports it (expected a {self.kind} defined there)"
        if actual.kind != self.kind:
            return f"it is a {actual.kind} now (expected a {self.kind})"
        if actual.parameters != self.parameters:
            what = "bases" if self.kind == "class" else "parameters"
            return _list_difference(what, self.parameters, actual.parameters)
        return _member_difference(self.members, actual.members)


def _list_difference(what: str, expected: str, actual: str) -> str:
    """Compare two lists of names; "name=" is a parameter with a default."""
    before = {name.rstrip("="): name for name in expected.split(", ") if name}
    after = {name.rstrip("="): name for name in actual.split(", ") if name}
    common = [name for name in after if name in before]
    changes = {
        "added": [after[name] for name in after if name not in before],
        "removed": [name for name in before if name not in after],
        "now optional:": [name for name in common if after[name] != before[name] and after[name].endswith("=")],
        "now required:": [name for name in common if after[name] != before[name] and before[name].endswith("=")],
    }
    parts = [f"{verb} {', '.join(names)}" for verb, names in changes.items() if names]
    if common != [name for name in before if name in after]:
        parts.append(f"reordered to ({actual})")
    return f"its {what} changed: {'; '.join(parts)}"


def _member_difference(expected: Sequence[str], actual: Sequence[str]) -> str:
    before = dict(member.split(":") for member in expected)
    after = dict(member.split(":") for member in actual)
    added = [name for name in after if name not in before]
    removed = [name for name in before if name not in after]
    changed = [name for name in after if name in before and after[name] != before[name]]
    parts = [
        f"{verb} {', '.join(names)}"
        for verb, names in (("added", added), ("removed", removed), ("changed", changed))
        if names
    ]
    return f"its members changed: {'; '.join(parts)}" if parts else "its body changed"


class SourceTree:
    """An unpacked package, installed or not, read as text.

    Args:
        package: the directory of the top-level package (the one that holds its `__init__.py`).
    """

    def __init__(self, package: Path) -> None:
        self.package = package
        self._modules: dict[str, tuple[bytes, ast.Module] | None] = {}
        self._hashes: dict[str, str] = {}

    def file(self, module: str) -> Path | None:
        """Give the source file of a dotted module name, or None when the tree has none."""
        base = self.package.joinpath(*module.split(".")[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return None

    def file_hash(self, module: str) -> str:
        """Hash a module's whole file: 32 hex digits of its SHA-256, empty when there is none.

        A file that is byte for byte the expected one needs no parsing: hashing takes under a
        millisecond, parsing 10 to 100.
        """
        if module not in self._hashes:
            path = self.file(module)
            self._hashes[module] = hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path else ""
        return self._hashes[module]

    def fingerprint(self, target: Target) -> Fingerprint:
        """Read a target's fingerprint; a module or symbol that is not there is "absent"."""
        source, scope, name = self._scope(target)
        found = list(_definitions(scope, name))
        if found:
            return _fingerprint(source, found, in_class="." in target.qualname)
        if name in _imported_names(scope):
            return Fingerprint(IMPORTED)
        return Fingerprint(ABSENT, similar=_similar(scope, name))

    def is_decorated(self, target: Target) -> bool:
        """Tell whether the source decorates the target's definition."""
        _, scope, name = self._scope(target)
        return any(getattr(node, "decorator_list", []) for node in _definitions(scope, name))

    def _scope(self, target: Target) -> tuple[bytes, Sequence[ast.stmt], str]:
        """Find the body that should define the target, and the name to look for in it."""
        parsed = self._parse(target.module)
        if parsed is None:
            return b"", (), target.qualname
        source, tree = parsed
        scope: Sequence[ast.stmt] = tree.body
        *parents, name = target.qualname.split(".")
        for parent in parents:
            classes = [node for node in _definitions(scope, parent) if isinstance(node, ast.ClassDef)]
            if not classes:
                return source, scope, target.qualname  # A dotted name, which no scope defines.
            scope = classes[-1].body
        return source, scope, name

    def _parse(self, module: str) -> tuple[bytes, ast.Module] | None:
        if module not in self._modules:
            path = self.file(module)
            if path is None:
                self._modules[module] = None
            else:
                source = path.read_bytes().replace(b"\r\n", b"\n")
                self._modules[module] = source, ast.parse(source, filename=str(path))
        return self._modules[module]


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Walk a scope: its statements and those of its if, try and with blocks, not of inner scopes."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for name in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (*_Function, ast.ClassDef)):
        return [node.name]
    targets = list(node.targets) if isinstance(node, ast.Assign) else []
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    for target in targets:  # Grows: `a, b = ...` names both. `a.b = ...` names nothing in this scope.
        if isinstance(target, (ast.Tuple, ast.List)):
            targets.extend(target.elts)
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _definitions(body: Sequence[ast.stmt], name: str) -> Iterator[_Definition]:
    for node in _statements(body):
        if isinstance(node, (*_Function, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.AugAssign)) and name in _names(
            node
        ):
            yield node


def _imported_names(body: Sequence[ast.stmt]) -> set[str]:
    return {
        alias.asname or alias.name
        for node in _statements(body)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def _similar(body: Sequence[ast.stmt], name: str) -> tuple[str, ...]:
    names = [known for node in _statements(body) for known in _names(node)]
    return tuple(difflib.get_close_matches(name, names, n=2))


def _fingerprint(source: bytes, found: Sequence[_Definition], *, in_class: bool) -> Fingerprint:
    lines = source.splitlines(keepends=True)
    # A property and its setter, or a function and its overloads, are one definition.
    normalised = b"\n".join(normalise(lines, node) for node in found)
    kind, parameters = "value", ""
    members: tuple[str, ...] = ()
    first, last = found[0], found[-1]
    if isinstance(last, ast.ClassDef):
        kind = "class"
        parameters = ", ".join(ast.unparse(base) for base in last.bases)
        members = tuple(
            f"{node.name}:{_digest(normalise(lines, node))[:8]}"
            for node in _statements(last.body)
            if isinstance(node, _Function)
        )
    elif isinstance(last, _Function):
        kind = _function_kind(first if isinstance(first, _Function) else last, in_class=in_class)
        parameters = _parameters(last.args)
    return Fingerprint(kind, parameters, _digest(normalised), members)


def _function_kind(node: ast.FunctionDef | ast.AsyncFunctionDef, *, in_class: bool) -> str:
    for decorator in node.decorator_list:
        name = ast.unparse(decorator).rpartition(".")[2]
        if name in ("property", "cached_property"):
            return "property"
        if name in ("classmethod", "staticmethod"):
            return name
    return "method" if in_class else "function"


def _parameters(arguments: ast.arguments) -> str:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    names = [arg.arg + ("=" if number >= required else "") for number, arg in enumerate(positional)]
    if arguments.posonlyargs:
        names.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [
        arg.arg + ("" if default is None else "=")
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    return ", ".join(names)


def normalise(lines: Sequence[bytes], node: _Definition) -> bytes:
    """Give a definition's source without docstrings, comments and blank lines, one tab per level of nesting."""
    decorators = getattr(node, "decorator_list", [])
    start = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    end = node.end_lineno or node.lineno
    kept = {number: lines[number - 1] for number in range(start, end + 1)}
    kept[end] = kept[end][: node.end_col_offset]
    for docstring in _docstrings(node):
        first, last = docstring.lineno, docstring.end_lineno or docstring.lineno
        head, tail = lines[first - 1][: docstring.col_offset], kept[last][docstring.end_col_offset :]
        for number in range(first, last + 1):
            kept[number] = b""
        kept[first] = head + _SEPARATOR.sub(b"", tail, count=1) if _SEPARATOR.match(tail) else head + tail
    return _relaid(b"".join(kept.values()))


def _docstrings(node: _Definition) -> Iterator[ast.Constant]:
    for inner in ast.walk(node):
        if isinstance(inner, (*_Function, ast.ClassDef)):
            first = inner.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value


def _relaid(text: bytes) -> bytes:
    """Take out comments and blank lines; indent each statement by its depth below the first line's."""
    columns = [_column(text[: len(text) - len(text.lstrip())])]
    brackets = 0

    def keep(match: re.Match[bytes]) -> bytes:
        nonlocal brackets
        group = match.lastgroup
        if group == "newline":
            if brackets:
                return b"\n"
            column = _column(match["indent"])
            while len(columns) > 1 and column < columns[-1]:
                columns.pop()
            if column > columns[-1]:
                columns.append(column)
            return b"\n" + b"\t" * (len(columns) - 1)
        if group == "continuation":
            return b"\\\n"
        if group == "open":
            brackets += 1
        elif group == "close":
            brackets -= 1
        return match[0]

    return _TOKEN.sub(keep, text).strip()


def _column(indent: bytes) -> int:
    """Count as Python does: a tab goes to the next multiple of eight, a form feed starts afresh."""
    return len(indent.rpartition(b"\f")[2].expandtabs(8))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
