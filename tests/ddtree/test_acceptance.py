"""The walk against the reference's cases and a plain loop; where a text ends."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ddtree.acceptance import emit, walk
from kimi_jax.ddtree.tree import build_tree, chain, truncate

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "ddtree" / "tree_cases.json").read_text())
CASES = [case for case in REFERENCE["cases"] + REFERENCE["extra"] if "verify" in case]

build = jax.jit(build_tree, static_argnums=1)


def walk_in_python(tree, next_tokens):
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    path = [0]
    while True:
        want = next_tokens[path[-1]]
        children = [r for r in range(1, int(tree.num_nodes) + 1) if parents[r] == path[-1] and tokens[r] == want]
        if not children:
            return path, want
        path.append(children[0])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_walks(case):
    assert CASES
    tree = build(jax.nn.log_softmax(jnp.asarray(case["logprobs"])), case["budget"])
    got = jax.jit(walk)(tree, jnp.asarray(case["verify"]["posterior"]))
    n = case["verify"]["acceptance_length"]
    assert int(got.length) == n
    assert got.path[:n].tolist() == case["verify"]["accepted_indices"]
    assert int(got.bonus) == case["verify"]["next_token"]
    assert got.tokens[:n].tolist() == [*(tree.tokens[r] for r in got.path[1:n]), got.bonus]
    assert got.path.shape == got.tokens.shape == (case["depth_limit"] + 1,)
    assert (np.asarray(got.tokens[n:]) == -1).all()
    assert (np.asarray(got.path[n:]) == 0).all()


def test_random_walks():
    """A batch of trees with padding: next tokens drawn so that long paths, short paths and dead ends all occur."""
    rng = np.random.default_rng(0)
    requests, budget = 60, 12
    log_probs = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(requests, 5, 4)) * 2, jnp.float32))
    nodes = jnp.asarray(rng.integers(0, budget + 1, size=requests))
    trees = jax.jit(jax.vmap(lambda x, n: truncate(build_tree(x, budget, root=2), n)))(log_probs, nodes)
    next_tokens = rng.integers(0, 4, size=(requests, budget + 1))
    got = jax.jit(jax.vmap(walk))(trees, jnp.asarray(next_tokens))
    lengths = set()
    for r in range(requests):
        path, bonus = walk_in_python(jax.tree.map(lambda x, r=r: x[r], trees), next_tokens[r])
        n = len(path)
        assert int(got.length[r]) == n
        assert got.path[r, :n].tolist() == path
        assert int(got.bonus[r]) == bonus == int(got.tokens[r, n - 1])
        assert got.tokens[r, : n - 1].tolist() == [int(trees.tokens[r, row]) for row in path[1:]]
        lengths.add(n)
    assert {1, 2, 3, 4} <= lengths


def test_padding_is_never_accepted():
    """Padding's token is 0: a target that says 0 everywhere must not walk into it."""
    tree = truncate(build(jax.nn.log_softmax(jnp.arange(12.0).reshape(3, 4)), 8), 0)
    got = jax.jit(walk)(tree, jnp.zeros(9, jnp.int32))
    assert int(got.length) == 1
    assert got.tokens.tolist() == [0, -1, -1, -1]


def test_perfect_drafter_accepts_the_block():
    tokens = jnp.array([5, 6, 7, 8])
    got = walk(chain(jnp.zeros(4), tokens, root=4), jnp.array([5, 6, 7, 8, 9]))
    assert int(got.length) == 5
    assert got.tokens.tolist() == [5, 6, 7, 8, 9]
    assert got.path.tolist() == [0, 1, 2, 3, 4]


STOP = jnp.array([90, 91])


@pytest.mark.parametrize(
    ("tokens", "length", "remaining", "expected", "finished"),
    [
        ([1, 2, 3, 4], 4, 10, [1, 2, 3, 4], False),
        ([1, 90, 3, 4], 4, 10, [1, 90], True),  # a stop token among accepted drafts
        ([1, 2, 3, 91], 4, 10, [1, 2, 3, 91], True),  # as the bonus token
        ([91, 90, 3, 4], 4, 10, [91], True),  # the first of two
        ([1, 2, 90, 4], 2, 10, [1, 2], False),  # not reached: stale values past the length do not count
        ([1, 2, 3, 4], 4, 3, [1, 2, 3], True),  # max_new_tokens is exact
        ([1, 2, 3, 4], 4, 4, [1, 2, 3, 4], True),
        ([1, 2, 3, 90], 4, 3, [1, 2, 3], True),  # the stop token lies past the limit
        ([1, 2, 90, 4], 4, 3, [1, 2, 90], True),
        ([1, 2, 3, 4], 4, 0, [], True),  # a finished request
    ],
)
def test_emit(tokens, length, remaining, expected, finished):
    got = jax.jit(emit)(jnp.array(tokens), jnp.array(length), STOP, jnp.array(remaining))
    n = int(got.count)
    assert got.tokens[:n].tolist() == expected
    assert (np.asarray(got.tokens[n:]) == -1).all()
    assert bool(got.finished) == finished


def test_emit_without_stop_tokens_keeps_every_value():
    """A mask id (here 163838) that the target really wrote stays: texts end by count, never by value."""
    got = emit(jnp.array([163838, 0, -1]), jnp.array(2), jnp.zeros(0, jnp.int32), jnp.array(9))
    assert got.tokens.tolist() == [163838, 0, -1]
    assert int(got.count) == 2
    assert not bool(got.finished)
