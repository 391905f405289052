"""Array annotations are executed: those of the packages by tests/conftest.py, and wrong ones are seen."""

import importlib
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, TypeCheckError, install_import_hook

from kimi_jax.ddtree.acceptance import walk
from kimi_jax.ddtree.tree import chain
from tests.annotations import fits

WRONG = """
    import dataclasses
    from jaxtyping import Array, Float, Int

    @dataclasses.dataclass
    class Pair:
        ids: Int[Array, "*batch n"]
        weights: Float[Array, "*batch n"] | None

    def pairs(x: Float[Array, "rows width"], count: int) -> tuple[Float[Array, "rows"], ...]:
        return tuple(x[:, i] for i in range(count)) if count < 9 else (x,)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "annotated_for_a_test.py").write_text(textwrap.dedent(WRONG))
    monkeypatch.syspath_prepend(tmp_path)
    with install_import_hook("annotated_for_a_test", "tests.annotations.checked"):
        yield importlib.import_module("annotated_for_a_test")
    del sys.modules["annotated_for_a_test"]


def test_wrong_arguments_results_and_fields_are_seen(module):
    x = jnp.zeros((3, 2))
    assert len(module.pairs(x, 2)) == 2
    for wrong in (x[0], x.astype(int), np.zeros(3, np.float32)):
        with pytest.raises(TypeCheckError, match="parameter 'x'"):
            module.pairs(wrong, 2)
    with pytest.raises(TypeCheckError, match="return value"):
        module.pairs(x, 9)
    module.Pair(jnp.zeros((5, 4), int), None)
    module.Pair(PartitionSpec("ep"), PartitionSpec("ep"))
    module.Pair(jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.bfloat16))
    with pytest.raises(TypeCheckError, match="parameter 'weights'"):
        module.Pair(jnp.zeros((5, 4), int), jnp.zeros((4, 5)))
    with pytest.raises(TypeCheckError, match="parameter 'ids'"):
        module.Pair(jax.ShapeDtypeStruct((4,), jnp.bfloat16), None)


def test_members_of_unions_are_told_apart():
    array, ids = jnp.zeros(3), jnp.zeros(3, int)
    assert fits(ids, Int[Array, "n"] | int)
    assert fits(7, Int[Array, "n"] | int)
    assert fits([array, 7], list[Float[Array, "n"]])  # lists and dicts are left to pyright
    assert not fits(array, Int[Array, "n"] | int | None)
    assert not fits((array, ids), tuple[Float[Array, "n"], Float[Array, "n"]])


def test_the_packages_are_under_the_hook():
    tree = chain(jnp.zeros(4), jnp.arange(4))
    with pytest.raises(TypeCheckError, match="parameter 'next_tokens'"):
        walk(tree, jnp.zeros((1, 5), int))
