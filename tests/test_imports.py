"""Imports run downwards only, with no circle: the order that docs/architecture.md states."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WITHOUT_JAX = {
    f"serving.{name}"
    for name in ("plan", "events", "pages", "prefix", "work", "group", "scheduler", "repeats", "transport", "arrivals")
}
"""What the host decides of requests; decoding executes it."""

LAYERS = (
    {"meshes", "config", "config_fields", "text_files", "standard_output", "tables", "checkpoint.errors"},
    {"pallas_kernels", "quantization", "parameters", "parallel"},
    {"model", "vision"},
    {
        "ddtree",
        "drafter",
        "checkpoint",
        "tokenizer",
        "tool_names",
        "tool_declaration",
        "chat",
        "prompts",
        "text_output",
        "generation_defaults",
    },
    {"ledger", *WITHOUT_JAX},
    {"decoding"},
    {"compilation_cache"},
    {
        *("estimator", "profiling", "evaluation", "training", "doctor", "opening", "gpu_check", "serving", "server"),
        *("commands.defaults", "commands.options", "commands.errors", "commands.progress", "provenance"),
    },
    {"commands"},
)
"""Rooms, lowest first. A room imports from lower layers and from its own, there without a circle."""


def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    files = (file for package in ("kimi_jax", "pallas_kernels", "meshes") for file in (ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


MODULES = modules()


class _WithoutTypes(ast.NodeTransformer):
    """Takes out what only type checkers import."""

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def imported(name: str, *, types: bool = True) -> Iterator[str]:
    """Modules of the project that a module imports anywhere, also inside functions, and for annotations."""
    tree = ast.parse(MODULES[name].read_text())
    for node in ast.walk(tree if types else _WithoutTypes().visit(tree)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


LAYER = {name: number for number, layer in enumerate(LAYERS) for name in layer}


def room(module: str) -> str:
    """The room of a module; `kimi_jax` itself, which only names the public API, is none of them."""
    package, *rest = module.split(".")
    if package != "kimi_jax":
        return package
    return ".".join(rest) if ".".join(rest) in LAYER else rest[0] if rest else ""


def test_every_room_has_its_place():
    assert {room(module) for module in MODULES} - {""} == LAYER.keys()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_downwards(module):
    own = room(module)
    upwards = [other for other in imported(module) if own and room(other) and LAYER[room(other)] > LAYER[own]]
    assert not upwards, f"{module} is below {', '.join(upwards)}"


def test_kernels_and_machines_know_nothing_of_the_model():
    for module in MODULES:
        if room(module) in ("pallas_kernels", "meshes"):
            assert not [other for other in imported(module) if other.startswith("kimi_jax")], module
        if room(module) == "meshes":
            assert not [other for other in imported(module) if room(other) == "pallas_kernels"], module


def test_the_host_decides_without_jax():
    names = [f"kimi_jax.{name}" for name in sorted(WITHOUT_JAX)]
    program = f"import sys, {', '.join(names)}; sys.exit(str({{'jax', 'flax'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.stderr.strip() == "set()"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names along some circle of a graph; empty where there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in graph[name]:
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in graph if (found := visit(name, []))), [])


def test_no_circle_between_rooms():
    graph: dict[str, set[str]] = {name: set() for name in LAYER}
    for module in MODULES:
        if own := room(module):
            graph[own] |= {room(other) for other in imported(module)} - {own, ""}
    assert circle(graph) == []


def test_no_circle_between_modules():
    """In one room two modules may name each other's types, but not need each other to run."""
    graph = {module: set(imported(module, types=False)) - {module, "kimi_jax"} for module in MODULES}
    # A package's own list of names is no import of its modules by each other.
    for module, others in graph.items():
        graph[module] = {other for other in others if not module.startswith(f"{other}.")}
    assert circle(graph) == []


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
