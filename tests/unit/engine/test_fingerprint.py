"""Fingerprints: equal on every Python, blind to what does not run, and able to say what changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from afd_shim.engine import Fingerprint, SourceTree, Target

SOURCE = '''
import functools
from elsewhere import moved

LIMIT = 8  # a comment


@functools.lru_cache(maxsize=None)
def factory(a, /, b, c=1, *rest, d, e=2, **kwargs):
    """A docstring
    of two lines."""
    # A comment.
    text = "# no comment"  # but this is

    def inner():
        "Another docstring."
        return """
# part of a string

"""

    return text, inner


class Runner(dict):
    """Docs."""

    limit: int = 3

    def forward(self, x):
        return x  # [batch, hidden]

    async def step(self):
        return None

    @property
    def gate(self):
        return 1

    @gate.setter
    def gate(self, value):
        pass

    @staticmethod
    def name(): "doc"; return 1


if LIMIT:
    def guarded():
        return 1
else:
    guarded = None
'''


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Fingerprint]:
    """Read a fingerprint of a symbol from source text."""

    def read(symbol: str, kind: Any = "function", source: str = SOURCE) -> Fingerprint:
        package = tmp_path / "upstream"
        package.mkdir(exist_ok=True)
        (package / "layer.py").write_text(source, encoding="utf-8")
        return SourceTree(package).fingerprint(Target(f"upstream.layer:{symbol}", kind=kind))

    return read


@pytest.mark.parametrize(
    ("symbol", "kind", "parameters", "source"),
    [  # Recorded on Python 3.11.
        ("factory", "function", "a, /, b, c=, *rest, d, e=, **kwargs", "a9f0f17f4b2df4ea"),
        ("Runner", "class", "dict", "f0edf1adc7b54e29"),
        ("Runner.forward", "method", "self, x", "ea623f92591c8151"),
        ("Runner.step", "method", "self", "4d46ab0faaf7f60b"),
        ("Runner.gate", "property", "self, value", "8d86f0408450ef52"),
        ("Runner.name", "staticmethod", "", "c9442aa47972161e"),
        ("Runner.limit", "value", "", "d7141a4c525ff5f4"),
        ("LIMIT", "value", "", "c58d7c98b0c3b0b3"),
        ("guarded", "value", "", "e2f20836a745c897"),
    ],
)
def test_same_on_every_python(read: Any, symbol: str, kind: str, parameters: str, source: str) -> None:
    """Kind, parameters and hash are the recorded ones, whichever interpreter reads the file."""
    found = read(symbol)

    assert (found.kind, found.parameters, found.source) == (kind, parameters, source)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# A comment.", "# Another comment."),
        ("    # A comment.\n", ""),
        ("# but this is", "#"),
        ("  # but this is", ""),
        ("A docstring\n    of two lines.", "Shorter."),
        ('    """A docstring\n    of two lines."""\n', ""),
        ('"Another docstring."', "'''Reflowed\n\n        docstring.'''"),
        ("    def inner", "\n\n    def inner"),
        ("\n\n    return text", "\n    return text"),
        ("@functools", "# about the cache\n@functools"),
        ("maxsize=None)\n", "maxsize=None)  # no limit\n"),
        ("return text, inner\n", "return text, inner  \t\n    # the end\n"),
    ],
)
def test_blind_to_what_does_not_run(read: Any, before: str, after: str) -> None:
    """Comments, docstrings, blank lines and trailing blanks are not part of the fingerprint."""
    assert before in SOURCE

    assert read("factory", source=SOURCE.replace(before, after)) == read("factory")


def test_blind_to_line_ends_and_column(read: Any) -> None:
    """A tree checked out with other line ends, or a definition moved into a block, is the same source."""
    moved = SOURCE.replace(
        "if LIMIT:\n    def guarded():\n        return 1",
        "if LIMIT:\n  if True:\n    def guarded():\n          return 1",
    )
    assert moved != SOURCE

    assert read("factory", source=SOURCE.replace("\n", "\r\n")) == read("factory")
    assert read("guarded", source=moved) == read("guarded")


NESTED = '''
def choose(first, second):
    """Docs."""
    if first:
        if second:
            value = """
  text
            """
            second = call(
                1,
                2,
            )
        value = first + \\
            second
    return value
'''


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("                1,\n                2,\n            )", "  1,\n2,\n      )"),  # within brackets
        ("+ \\\n            second", "+ \\\n  second"),  # after a backslash
        ("        value = first", "# odd\n                  # odder\n        value = first"),
        ("        value = first", "\n      \n  \f\n        value = first"),
        ("    return", "                # the block's end\n    return"),
        ('    """Docs."""\n', ""),
        ('    """Docs."""\n', '    """Docs:\n  - more\n"""\n'),
        ('    """Docs."""\n', '    """Docs."""; \n'),
        ("    ", "  "),  # the width of every level
        ("    ", "\t"),
    ],
)
def test_blind_to_layout(read: Any, before: str, after: str) -> None:
    """How wide a level is, and where a statement's further lines and comments begin, is not part of the fingerprint."""
    assert before in NESTED
    # The text of a string is no layout.
    head, string, tail = NESTED.partition("\n  text\n            ")
    source = head.replace(before, after) + string + tail.replace(before, after)
    assert source != NESTED

    assert read("choose", source=source) == read("choose", source=NESTED)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        value = first", "    value = first"),
        ("        value = first", "            value = first"),
        ("            second = call", "        second = call"),
        ("    return", "        return"),
        ("\n  text", "\n    text"),
        ('            """\n            second', '        """\n            second'),
    ],
)
def test_nesting_is_seen(read: Any, before: str, after: str) -> None:
    """A statement that moves into a block or out of one is another source, and so is the text of a string."""
    assert before in NESTED
    expected = read("choose", source=NESTED)

    assert expected.difference(read("choose", source=NESTED.replace(before, after))) == "its body changed"


def test_statement_leaves_a_method(read: Any) -> None:
    """Also in the methods of a class, which are named."""
    source = "class Runner:\n    def step(self):\n        if self:\n            self.go()\n            return 1\n"

    changed = read("Runner", source=source.replace("            return", "        return"))

    assert read("Runner", source=source).difference(changed) == "its members changed: changed step"


def test_statement_on_the_docstring_s_line(read: Any) -> None:
    """What follows a docstring on its line is compared, with the docstring or without."""
    expected = read("Runner.name")

    assert read("Runner.name", source=SOURCE.replace('"doc"; ', "")) == expected
    assert expected.difference(read("Runner.name", source=SOURCE.replace('"doc"; return 1', '"doc"; return 2')))


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ("# no comment", "# changed", "its body changed"),
        ("# part of a string\n", "", "its body changed"),
        ("# part of a string\n\n", "# part of a string\n", "its body changed"),
        ("maxsize=None", "maxsize=8", "its body changed"),
        ("c=1", "c=2", "its body changed"),
        ("return text, inner", "return inner, text", "its body changed"),
        ("b, c=1", "b, new, c=1", "its parameters changed: added new"),
        ("d, e=2", "e=2", "its parameters changed: removed d"),
        ("c=1", "renamed=1", "its parameters changed: added renamed=; removed c"),
        ("a, /, b,", "b, /, a,", "its parameters changed: reordered to (b, /, a, c=, *rest, d, e=, **kwargs)"),
        ("d, e=2", "d=0, e=2", "its parameters changed: now optional: d"),
        ("c=1, *rest", "c, *rest", "its parameters changed: now required: c"),
        ("def factory", "def factories", "it is gone (expected a function; similar: factories)"),
        (
            "def factory(a, /, b, c=1, *rest, d, e=2, **kwargs)",
            "class factory",
            "it is a class now (expected a function)",
        ),
    ],
)
def test_mutants_are_told_apart(read: Any, before: str, after: str, difference: str) -> None:
    """Whatever changes what runs is seen, and the sentence says what changed."""
    assert before in SOURCE

    assert read("factory").difference(read("factory", source=SOURCE.replace(before, after))) == difference


def test_class_difference_names_its_members(read: Any) -> None:
    """A changed class names the methods that were added, removed or changed."""
    mutant = (
        SOURCE.replace("return x ", "return -x ").replace("async def step", "async def tick").replace("dict", "list")
    )

    assert read("Runner").difference(read("Runner", source=mutant)) == "its bases changed: added list; removed dict"
    assert read("Runner").difference(read("Runner", source=mutant.replace("list", "dict"))) == (
        "its members changed: added tick; removed step; changed forward"
    )
    assert read("Runner").difference(read("Runner", source=SOURCE.replace("= 3", "= 4"))) == "its body changed"


def test_moved_symbol_is_not_taken_for_its_import(read: Any) -> None:
    """A module that only imports a symbol does not define it."""
    expected = Fingerprint("function", "x", "0")

    assert (
        expected.difference(read("moved"))
        == "it has moved: the module now imports it (expected a function defined there)"
    )


def test_attribute_assignment_is_no_definition(read: Any) -> None:
    """`Runner.extra = 1` below the class does not redefine it."""
    assert read("Runner", source=SOURCE + "\nRunner.extra = 1\n") == read("Runner")


def test_class_turned_into_a_function_takes_its_methods_along(read: Any) -> None:
    """A method of what is no class any more is gone."""
    mutant = SOURCE.replace("class Runner(dict):", "def Runner(dict):")

    assert read("Runner.forward", source=mutant).kind == "absent"


def test_missing_module_and_package_module(tmp_path: Path) -> None:
    """A module may be a file or a package; one that is neither defines nothing."""
    package = tmp_path / "upstream"
    (package / "layer").mkdir(parents=True)
    (package / "layer" / "__init__.py").write_text(dedent("def factory(): pass\n"), encoding="utf-8")
    tree = SourceTree(package)

    assert tree.fingerprint(Target("upstream.layer:factory", kind="function")).kind == "function"
    assert tree.fingerprint(Target("upstream.nowhere:factory", kind="function")).kind == "absent"
    assert tree.file_hash("upstream.nowhere") == ""
    assert len(tree.file_hash("upstream.layer")) == 32
