"""Write docs/architectures.md: every MoE architecture of the installed vLLM, and whether it is split.

Read from vLLM's source, without importing it: the registry names each architecture's class, and the
classes it leads to are followed to their calls of `FusedMoEFactory`. With `--check`, writes nothing
and fails where the page is not what the source says.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from afd_shim.compat import probe
from afd_shim.config.models import REFUSED_ARCHITECTURES
from afd_shim.testing.families import FAMILIES

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
REGISTRY = "vllm.model_executor.models.registry"
MODELS = "vllm.model_executor.models"
ROOMS = (f"{MODELS}.", "vllm.models.")
OTHER_PLATFORMS = {"amd", "cpu", "xpu"}
DRAFTS = "_SPECULATIVE_DECODING_MODELS"
FACTORY = "FusedMoEFactory"
# A model that is refused for this may share its other layers with models that are split.
BYPASS = REFUSED_ARCHITECTURES["MiniCPMForCausalLM"]
# Arguments of the factory that make a layer need more than hidden states and router logits.
NEEDS_MORE = {"hash_indices_table", "bias_vl", "zero_expert_type", "router", "runner_cls", "moe_config_cls"}

Name = tuple[str, str]  # module, name in it


@dataclass(frozen=True, slots=True)
class MoELayer:
    """One call of the factory: the class it stands in, who applies the gate, what else it needs."""

    where: str
    runner_has_gate: bool
    needs: frozenset[str]


@dataclass(slots=True)
class Module:
    """What a module defines and imports at any depth; an import may have one source per platform."""

    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, list[Name]] = field(default_factory=dict)


class Source:
    """vLLM's models as text."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._modules: dict[str, Module] = {}
        self._links: dict[Name, tuple[frozenset[MoELayer], frozenset[str]]] = {}

    def architectures(self) -> dict[str, Name]:
        """Architecture to module and class, drafts apart."""
        tree = self._parse(REGISTRY)
        found: dict[str, Name] = {}
        for statement in tree.body if tree else ():
            if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Dict):
                continue
            name = statement.targets[0]
            if not isinstance(name, ast.Name) or not name.id.endswith("_MODELS") or name.id == DRAFTS:
                continue
            for key, value in zip(statement.value.keys, statement.value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module, cls = (str(part.value) for part in value.elts if isinstance(part, ast.Constant))
                    found[str(key.value)] = (module if module.startswith("vllm.") else f"{MODELS}.{module}", cls)
        return found

    def layers(self, start: Name) -> set[MoELayer]:
        """The factory calls that a class leads to."""
        found: set[MoELayer] = set()
        seen: set[Name] = set()
        waiting = [start]
        while waiting:
            name = waiting.pop()
            if name in seen or not name[0].startswith(ROOMS):
                continue
            seen.add(name)
            module = self._module(name[0])
            definition = module.definitions.get(name[1])
            if definition is None:
                waiting += module.imports.get(name[1], [])
                continue
            calls, names = self._read(name, definition)
            found |= calls
            for used in names:
                if used in module.definitions:
                    waiting.append((name[0], used))
                else:
                    waiting += module.imports.get(used, [])
        return found

    def _read(self, name: Name, definition: ast.stmt) -> tuple[frozenset[MoELayer], frozenset[str]]:
        if name not in self._links:
            where = f"{_short(name[0])}:{name[1]}"
            self._links[name] = frozenset(_factory_calls(definition, where)), frozenset(_names(definition))
        return self._links[name]

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            self._modules[name] = module = Module()
            tree = self._parse(name)
            is_package = not self.package.joinpath(*name.split(".")[1:]).with_suffix(".py").is_file()
            for node in ast.walk(tree) if tree else ():
                if isinstance(node, ast.ImportFrom):
                    base = _absolute(node, name, is_package=is_package)
                    if OTHER_PLATFORMS.isdisjoint(base.split(".")):
                        for alias in node.names:
                            module.imports.setdefault(alias.asname or alias.name, []).append((base, alias.name))
            for node in tree.body if tree else ():
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    module.definitions[node.name] = node
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    module.definitions[node.targets[0].id] = node  # Jamba picks its layers from a dictionary
        return self._modules[name]

    def _parse(self, module: str) -> ast.Module | None:
        base = self.package.joinpath(*module.split(".")[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(encoding="utf-8"))
        return None


def _short(module: str) -> str:
    """A module's name within vLLM's models."""
    return module.rpartition("models.")[2]


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _names(definition: ast.stmt) -> Iterator[str]:
    """Names a definition uses, type annotations apart."""
    annotations = {
        id(inner)
        for node in ast.walk(definition)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
        for inner in ast.walk(part)
    }
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and id(node) not in annotations:
            yield node.id


def _factory_calls(definition: ast.stmt, where: str) -> Iterator[MoELayer]:
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == FACTORY:
            given = {
                keyword.arg
                for keyword in node.keywords
                if keyword.arg and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
            }
            yield MoELayer(where, "gate" in given, frozenset(given & NEEDS_MORE))


def rows(source: Source) -> Iterator[tuple[str, str, str, str]]:
    """Architecture, its MoE layers, who applies the gate, and what becomes of it."""
    tested = {family.architecture for family in FAMILIES.values()}
    architectures = source.architectures()
    for architecture in sorted({*architectures, *REFUSED_ARCHITECTURES}, key=lambda name: (name.lower(), name)):
        layers = source.layers(architectures[architecture]) if architecture in architectures else set()
        reason = REFUSED_ARCHITECTURES.get(architecture)
        if not layers and reason is None:
            continue
        gates = {"runner" if layer.runner_has_gate else "model" for layer in layers}
        outcome = f"no: {reason}" if reason else "yes, tested" if architecture in tested else "yes"
        classes = ", ".join(sorted(f"`{layer.where}`" for layer in layers)) or "-"
        yield f"`{architecture}`", classes, " or ".join(sorted(gates, reverse=True)) or "-", outcome


def overlooked(source: Source) -> Iterator[str]:
    """Architectures that are not refused by name, though every MoE layer of theirs cannot be split.

    A layer cannot be split if its factory call asks for more than travels, or if it stands in the
    own module of a model that is refused for its layers.
    """
    architectures = source.architectures()
    layers = {architecture: source.layers(name) for architecture, name in architectures.items()}
    refused = {
        layer
        for architecture, found in layers.items()
        if REFUSED_ARCHITECTURES.get(architecture, BYPASS) != BYPASS
        for layer in found
        if f"{layer.where.partition(':')[0]}.".startswith(f"{_short(architectures[architecture][0])}.")
    }
    for architecture, found in layers.items():
        if architecture in REFUSED_ARCHITECTURES or not found:
            continue
        if all(layer.needs or layer in refused for layer in found):
            yield f"{architecture}: {', '.join(sorted(layer.where for layer in found))}"


HEADER = """# Architectures

<!-- Written by tools/models_table.py from the source of vLLM {release}. Do not edit. -->

Every model whose MoE layers vLLM builds through `FusedMoEFactory` is split; there is no list of adapters. This
table is read from the source of vLLM {release}: which architectures lead to such a layer, where it is built, and who
applies the gate.

- *runner*: vLLM's MoE runner applies the gate. It runs on the FFN, or on Attention with `compute_gate_on_attention`.
- *model*: the model calls its gate itself, so it stays on Attention, and router logits always travel.
- *runner or model*: depends on the model's configuration.

"Yes, tested" are the families that the tests and `afd-shim demo` run against the unsplit model on every release.
What is refused is refused by name before anything loads; a layer that needs something that does not travel is refused
again, for the same reason, when it is built. A multimodal model that takes its language model from the
configuration is not listed: it is split if that one is. An architecture that has dense checkpoints too is split
where `config.json` asks for experts. Speculative decoding is refused for all, so draft models are not listed.

| Architecture | MoE layers | Gate applied by | Split |
|---|---|---|---|
"""


def page(source: Source, release: str) -> str:
    """The whole page."""
    table = (f"| {' | '.join(row)} |" for row in rows(source))
    return HEADER.format(release=release) + "\n".join(table) + "\n"


def main(arguments: Iterable[str]) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(list(arguments))
    release = probe()
    if release.package is None:
        print("There is no vLLM to read; install one.")
        return 1
    source = Source(release.package)
    missing = list(overlooked(source))
    for line in missing:
        print(f"{line} cannot be split; add the architecture to afd_shim/config/models.py")
    text = page(source, release.public)
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        return bool(missing)
    old = PAGE.read_text(encoding="utf-8")
    for line in difflib.unified_diff(
        old.splitlines(), text.splitlines(), "docs/architectures.md", "vLLM's source", lineterm=""
    ):
        print(line)
    return bool(missing) or old != text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
