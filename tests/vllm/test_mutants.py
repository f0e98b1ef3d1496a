"""Mutants of the installed vLLM: every symbol on record, edited in every way, in a copy that nobody imports."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from afd_shim.compat import Matrix, probe
from afd_shim.engine import Fingerprint, SourceTree, Target
from afd_shim.selection import merged_set

ROW = Matrix.load().rows[probe().row or ""]
TARGETS = {target.symbol: target for patch in merged_set(ROW, ROW.sets) for target in patch.targets}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


Mutate = Callable[[Target, list[str]], Fingerprint]


class Source:
    """One module's text, and the definition of one target in it."""

    def __init__(self, target: Target) -> None:
        package = probe().package
        assert package is not None
        path = SourceTree(package).file(target.module)
        assert path is not None
        self.target = target
        self.lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        body: list[ast.stmt] = ast.parse("".join(self.lines)).body
        for name in target.qualname.split("."):
            found = [node for node in scope(body) if isinstance(node, Definition) and node.name == name]
            body = found[-1].body
        self.node = found[-1]
        #: The other branch of an `if` defines it too.
        self.has_variants = len(found) > 1

    @property
    def indent(self) -> str:
        """The definition's indentation."""
        return " " * self.node.col_offset

    def name_line(self) -> int:
        """Give the index of the line with `def` or `class`."""
        return self.node.lineno - 1

    def last(self) -> ast.stmt:
        """Give the last statement of the body."""
        return self.node.body[-1]

    def renamed(self, text: str) -> list[str]:
        """Give the lines with the definition renamed, `text` before it."""
        lines, number = list(self.lines), self.name_line()
        decorators = getattr(self.node, "decorator_list", [])
        first = min([number, *(decorator.lineno - 1 for decorator in decorators)])
        lines[number] = lines[number].replace(f"{self.node.name}", f"{self.node.name}_v2", 1)
        return [*lines[:first], text, *lines[first:]]


def scope(body: list[ast.stmt]) -> list[ast.stmt]:
    """List a scope's statements, those in branches of an `if` included."""
    branches = [node.body + node.orelse for node in body if isinstance(node, ast.If)]
    return body + [inner for branch in branches for inner in scope(branch)]


Edit = Callable[[Source], list[str]]


def rename(source: Source) -> list[str]:
    """Give the definition another name."""
    return source.renamed("")


def delete(source: Source) -> list[str]:
    """Take the definition out."""
    decorators = source.node.decorator_list
    first = min([source.node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    return [*source.lines[:first], f"{source.indent}pass\n", *source.lines[source.node.end_lineno :]]


def change_kind(source: Source) -> list[str]:
    """Put a class in a function's place, or the reverse."""
    name, indent = source.node.name, source.indent
    other = f"def {name}(self=None): pass" if isinstance(source.node, ast.ClassDef) else f"class {name}: pass"
    return source.renamed(f"{indent}{other}\n")


def change_body(source: Source) -> list[str]:
    """Add a statement."""
    last = source.last()
    lines, number = list(source.lines), last.lineno - 1
    return [*lines[:number], f"{' ' * last.col_offset}mutant = 1\n", *lines[number:]]


def add_parameter(source: Source) -> list[str]:
    """Add a first parameter."""
    lines, number = list(source.lines), source.name_line()
    opening = lines[number].index("(", lines[number].index(source.node.name)) + 1
    lines[number] = f"{lines[number][:opening]}mutant, {lines[number][opening:]}"
    return lines


def reorder_parameters(source: Source) -> list[str]:
    """Swap the names of two neighbouring parameters."""
    assert not isinstance(source.node, ast.ClassDef)
    first, second = source.node.args.args[-2:]
    lines = list(source.lines)
    for old, new in ((second, first), (first, second)):
        line = lines[old.lineno - 1]
        lines[old.lineno - 1] = line[: old.col_offset] + new.arg + line[old.col_offset + len(old.arg) :]
    return lines


Compound = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith


def blocks(source: Source) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    """List the compound statements in the definition, each with its last block where that has lines of its own."""
    for node in ast.walk(source.node):
        if isinstance(node, Compound):
            block: list[ast.stmt] = getattr(node, "orelse", []) or node.body
            if begins_line(source, block[-1]) and block[0].col_offset > node.col_offset:
                yield node, block


def begins_line(source: Source, node: ast.stmt) -> bool:
    """Tell whether a statement is the first of its line."""
    return not source.lines[node.lineno - 1].encode()[: node.col_offset].strip()


def moved(source: Source, node: ast.stmt, column: int) -> list[str]:
    """Give the lines with one simple statement at another column; its further lines stay."""
    lines = list(source.lines)
    lines[node.lineno - 1] = " " * column + lines[node.lineno - 1].lstrip(" ")
    return lines


def dedent_statement(source: Source) -> list[str]:
    """Move the last statement of a block out of it."""
    for node, block in blocks(source):
        if len(block) > 1 and not isinstance(block[-1], (Compound, ast.Try, Definition)):
            return moved(source, block[-1], node.col_offset)
    pytest.skip("no block of two statements ends with a simple one")


def indent_statement(source: Source) -> list[str]:
    """Move the statement after a block into it."""
    ends = {id(node): block[-1].col_offset for node, block in blocks(source)}
    for node in ast.walk(source.node):
        body: list[ast.stmt] = getattr(node, "body", []) if isinstance(node, (Compound, Definition)) else []
        for before, after in pairwise(body):
            if id(before) in ends and not isinstance(after, (Compound, ast.Try, Definition)):
                return moved(source, after, ends[id(before)])
    pytest.skip("no simple statement comes after a block")


def edit_comments(source: Source) -> list[str]:
    """Add a comment and blank lines."""
    last = source.last()
    lines, number = list(source.lines), last.lineno - 1
    return [*lines[:number], "\n", f"{' ' * last.col_offset}# A maintainer's note.\n", "\n", *lines[number:]]


def edit_docstring(source: Source) -> list[str]:
    """Replace the docstring, or add one."""
    first = source.node.body[0]
    start = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", []))]) - 1
    has = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    end = first.end_lineno if has else start
    other = '"""Other\n\n words."""'
    return [*source.lines[:start], f"{' ' * first.col_offset}{other}\n", *source.lines[end:]]


@pytest.fixture
def mutant(tmp_path: Path) -> Mutate:
    """Write a module's text into a tree of its own and read the target's fingerprint there."""

    def write(target: Target, lines: list[str]) -> Fingerprint:
        path = tmp_path.joinpath(*target.module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
        ast.parse("".join(lines))  # A mutant that does not compile proves nothing.
        return SourceTree(tmp_path / "vllm").fingerprint(target)

    return write


@pytest.mark.parametrize("symbol", TARGETS)
def test_installed_source_is_the_one_on_record(symbol: str) -> None:
    """The wheel that is installed here has the fingerprints of its row, read afresh."""
    package = probe().package
    assert package is not None

    assert SourceTree(package).fingerprint(TARGETS[symbol]) == ROW.fingerprints[symbol]


@pytest.mark.parametrize("symbol", TARGETS)
@pytest.mark.parametrize(
    ("edit", "difference"),
    [
        (rename, "it is gone"),
        (delete, "it is gone"),
        (change_kind, "it is a "),
        (change_body, "changed"),
        (add_parameter, "added mutant"),
        (reorder_parameters, "reordered"),
        (dedent_statement, "changed"),
        (indent_statement, "changed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mutant_is_drifted(mutant: Mutate, symbol: str, edit: Edit, difference: str) -> None:
    """A symbol with another name, kind, body, nesting or parameters, or that is gone, differs, and it is said how."""
    source = Source(TARGETS[symbol])
    if edit in (add_parameter, reorder_parameters):
        if isinstance(source.node, ast.ClassDef):
            pytest.skip("a class has no parameters")
        if edit is reorder_parameters and len(source.node.args.args) < 2:
            pytest.skip("nothing to reorder")

    if source.has_variants and edit in (rename, delete):
        difference = "changed"  # The other variant is still there.

    found = mutant(source.target, edit(source))

    assert difference in ROW.fingerprints[symbol].difference(found)


@pytest.mark.parametrize("symbol", TARGETS)
@pytest.mark.parametrize("edit", [edit_comments, edit_docstring], ids=lambda edit: edit.__name__)
def test_edit_that_does_not_run_is_no_drift(mutant: Mutate, symbol: str, edit: Edit) -> None:
    """Comments, docstrings and blank lines in a vendor's copy change nothing."""
    source = Source(TARGETS[symbol])

    assert mutant(source.target, edit(source)) == ROW.fingerprints[symbol]
