"""One module knows each fact: an expert's bytes, what an exchange sends, how options make a layout, a group's requests.

The rules read the source; each is shown to find what it looks for.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names(node: ast.AST) -> set[str]:
    """Names and attributes anywhere inside an expression."""
    found = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    return found | {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def product_of(*wanted: str) -> Callable[[ast.AST], bool]:
    """A product in which all the names stand."""
    return lambda node: isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and {*wanted} <= names(node)


def call_of(name: str, *keywords: str) -> Callable[[ast.AST], bool]:
    """A call of a function, or one with keywords whose values are not constants."""
    return lambda node: (
        isinstance(node, ast.Call)
        and name in names(node.func)
        and {*keywords} <= {k.arg for k in node.keywords if not isinstance(k.value, ast.Constant)}
    )


def declares_exchange(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and names(node.func) == {"Message"} and "EP" in names(node)


EXCHANGES = {
    f"kimi_jax/parallel/exchange/{name}.py"
    for name in ("all_gather", "all_to_all", "hierarchical", "ragged_all_to_all")
}

RULES = {
    # Bytes come from the declarations: no product of an expert's sizes anywhere.
    "an expert's bytes": (
        product_of("hidden_size", "moe_intermediate_size"), set(), "3 * c.hidden_size * c.moe_intermediate_size",
    ),
    "an exchange's messages": (declares_exchange, EXCHANGES, 'Message("rows", "all-gather", EP, 3)'),
    "a layout from options": (
        call_of("with_axes", "dp", "ep", "tp"), set(), "preset(o.mesh).with_axes(dp=o.dp, ep=o.ep, tp=o.tp)",
    ),
    "requests of a group": (product_of("dp", "ep"), {"meshes/presets.py"}, "-(-requests // (layout.dp * layout.ep))"),
    "tokens of a page": (
        lambda node: isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and "PAGE" in names(node),
        {"kimi_jax/model/pages.py", "kimi_jax/parallel/sharding.py"}, "PAGE * ranks",
    ),
    "a card by its kind": (
        lambda node: isinstance(node, ast.Call) and names(node.func) >= {"startswith"} and "device_kind" in names(node),
        {"meshes/hardware.py"}, "kind.startswith(gpu.device_kind)",
    ),
}  # fmt: skip


def knowing(rule: Callable[[ast.AST], bool]) -> Iterator[str]:
    """Product files in which something of the rule stands."""
    for package in ("kimi_jax", "meshes", "pallas_kernels"):
        for file in (ROOT / package).rglob("*.py"):
            if any(rule(node) for node in ast.walk(ast.parse(file.read_text()))):
                yield str(file.relative_to(ROOT))


@pytest.mark.parametrize("fact", RULES)
def test_one_place_knows(fact):
    rule, places, example = RULES[fact]
    assert any(rule(node) for node in ast.walk(ast.parse(example)))
    assert set(knowing(rule)) == places


def test_parts_are_the_named_scopes():
    """Every scope that the model's code opens is a part, a name within one, or the branch that reports leave out."""
    from kimi_jax.ledger.part import PARTS, SCOPES

    inside = {"output", "block", "overflow"}
    opened = set()
    for room in ("model", "drafter", "decoding", "parallel", "ddtree"):
        for file in (ROOT / "kimi_jax" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if call_of("named_scope")(node) and isinstance(node, ast.Call):
                    opened |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    assert opened <= SCOPES.keys() | inside
    assert set(PARTS) - opened <= {"other"}
