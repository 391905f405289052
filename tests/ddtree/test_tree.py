"""Draft trees against the reference's cases and an independent heap, in exact order."""

import functools
import heapq
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from kimi_jax.ddtree.tree import (
    DraftTree,
    build_from_top_k,
    build_lattice,
    build_tree,
    chain,
    greedy_path,
    resize,
    top_log_probs,
    truncate,
)

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "ddtree" / "tree_cases.json").read_text())
CASES = REFERENCE["cases"] + [case for case in REFERENCE["extra"] if "logprobs" in case]


@functools.cache
def builder(budget: int, keep_chain: bool = False):
    return jax.jit(lambda log_probs, root=0: build_tree(log_probs, budget, root=root, keep_chain=keep_chain))


lattice_builder = jax.jit(build_lattice, static_argnames=("budget", "keep_chain"))


def heap_tree(scores, ids, budget: int):
    """Best-first search with a heap and exact sums. scores(depth, parent_rank) -> log-probs by rank, 1-based depth.

    Returns (token, parent row, depth, cumulative log-probability) of each node in order.
    """
    depth = len(ids)
    heap: list = []
    unit = 2**149  # every float32 is a whole number of the smallest one

    def push(ranks, cum, row):
        if len(ranks) == depth:
            return
        for rank, value in enumerate(scores(len(ranks) + 1, ranks[-1] if ranks else 0)):
            if np.isfinite(value):
                numerator, denominator = float(value).as_integer_ratio()
                total = cum + numerator * (unit // denominator)
                heapq.heappush(heap, (-total, (*ranks, rank), row))

    push((), 0, 0)
    nodes = []
    while heap and len(nodes) < budget:
        negative, ranks, row = heapq.heappop(heap)
        nodes.append((int(ids[len(ranks) - 1][ranks[-1]]), row, len(ranks), -negative / unit))
        push(ranks, -negative, len(nodes))
    return nodes


def heap_marginal(log_probs: np.ndarray, budget: int):
    order = np.argsort(-log_probs, axis=-1, kind="stable")
    values = np.take_along_axis(log_probs, order, axis=-1)
    return heap_tree(lambda d, _: values[d - 1], order, budget)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return np.array(jax.nn.log_softmax(jnp.asarray(x, jnp.float32)))


def check(tree: DraftTree, nodes: list, budget: int):
    """Every field of a tree against nodes as `heap_tree` returns them; padding included."""
    n = len(nodes)
    tree = jax.tree.map(np.asarray, tree)
    assert tree.tokens.shape == (budget + 1,)
    assert tree.num_nodes == n
    assert tree.tokens[1 : n + 1].tolist() == [node[0] for node in nodes]
    assert tree.parents[: n + 1].tolist() == [-1] + [node[1] for node in nodes]
    assert tree.depths[: n + 1].tolist() == [0] + [node[2] for node in nodes]
    np.testing.assert_allclose(tree.cum_log_probs[1 : n + 1], [node[3] for node in nodes], rtol=1e-6, atol=1e-6)
    assert tree.cum_log_probs[0] == 0
    expected = np.zeros((budget + 1, budget + 1), bool)
    for row in range(n + 1):
        at = row
        while at >= 0:
            expected[row, at] = True
            at = int(tree.parents[at])
    np.testing.assert_array_equal(tree.ancestors, expected)
    assert (tree.parents[n + 1 :] == -1).all()
    assert (tree.depths[n + 1 :] == 0).all()
    assert (tree.tokens[n + 1 :] == 0).all()
    assert np.isneginf(tree.cum_log_probs[n + 1 :]).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reference_cases(case):
    # The reference feeds these as logits and normalises them in float32.
    log_probs = log_softmax(case["logprobs"])
    tree = builder(case["budget"])(log_probs)
    if case["name"].startswith("tie"):
        # Ties of rounded decimals: whether [0, 1] or [2] is larger hangs on the normaliser's last bit, so the reference
        # fixes the sums in order, to the file's rounding, and the heap the order for the very same float32 input.
        np.testing.assert_allclose(tree.cum_log_probs[1:], [n["cum_logprob"] for n in case["nodes"]], atol=3e-6)
        check(tree, heap_marginal(log_probs, case["budget"]), case["budget"])
        return
    nodes = [(n["token"], n["parent"], n["depth"], n["cum_logprob"]) for n in case["nodes"]]
    check(tree, nodes, case["budget"])
    if "surrogate_expected_accept" in case:
        np.testing.assert_allclose(np.exp(tree.cum_log_probs).sum(), case["surrogate_expected_accept"] + 1, atol=1e-5)


def paths(tree: DraftTree) -> list[list[int]]:
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    found = []
    for row in range(1, int(tree.num_nodes) + 1):
        path = []
        while row > 0:
            path.append(int(tokens[row]))
            row = int(parents[row])
        found.append(path[::-1])
    return found


def test_budget_zero_case():
    case = next(case for case in REFERENCE["extra"] if case["name"] == "budget0")
    tree = build_tree(jnp.zeros((7, 50)), 0, root=11)
    assert tree.parents.tolist() == case["parents"]
    assert tree.ancestors.astype(int).tolist() == case["visibility"]
    assert tree.tokens.tolist() == [11]
    assert int(tree.num_nodes) == 0


def test_random_tables_against_a_heap():
    """250 tables, flat to peaked, in batches of 50 by vmap; exact order although many sums differ by 1e-6 or less."""
    rng = np.random.default_rng(0)
    shapes = [(7, 40, 8), (15, 97, 63), (1, 9, 5), (2, 3, 64), (7, 20, 1)]
    count = 0
    for depth, vocab, budget in shapes:
        tables = rng.normal(size=(50, depth, vocab)) * rng.uniform(0.3, 5, size=(50, 1, 1))
        log_probs = log_softmax(tables)
        trees = jax.jit(jax.vmap(functools.partial(build_tree, budget=budget)))(log_probs)
        trees = jax.tree.map(np.asarray, trees)
        for r in range(50):
            check(jax.tree.map(lambda x, r=r: x[r], trees), heap_marginal(log_probs[r], budget), budget)
            count += 1
    assert count == 250


def test_ties_follow_the_rank_tuple():
    """Dyadic log-probabilities: sums are exact, so equal sums are ties in every order of addition."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        log_probs = -rng.integers(1, 5, size=(6, 9)).astype(np.float32) / 4
        check(builder(31)(log_probs), heap_marginal(log_probs, 31), 31)


def test_ties_survive_rounding():
    """Three numbers added in six orders differ in float32; as paths they tie exactly."""
    log_probs = np.tile(np.float32([-0.7, -1.1, -1.9]), (3, 1))
    assert len({(a + b) + c for a, b, c in itertools.permutations(log_probs[0])}) > 1
    check(builder(39)(log_probs), heap_marginal(log_probs, 39), 39)


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 12, 13, 64])
def test_budgets_around_saturation(budget):
    """Vocabulary 3, two positions: 3 + 9 = 12 prefixes exist, whatever the budget."""
    log_probs = log_softmax(np.random.default_rng(2).normal(size=(2, 3)))
    tree = builder(budget)(log_probs)
    assert int(tree.num_nodes) == min(budget, 12)
    check(tree, heap_marginal(log_probs, budget), budget)


def test_block_of_one_has_only_the_root():
    tree = build_tree(jnp.zeros((0, 5)), 4, root=3)
    check(tree, [], 4)
    assert tree.tokens.tolist() == [3, 0, 0, 0, 0]


def test_forbidden_tokens_are_never_drafted():
    log_probs = log_softmax(np.random.default_rng(3).normal(size=(3, 4)))
    log_probs[0, 1:] = -np.inf
    log_probs[1, 0] = -np.inf
    log_probs[2] = -np.inf
    tree = builder(32)(log_probs)
    assert int(tree.num_nodes) == 1 + 3
    check(tree, heap_marginal(log_probs, 32), 32)


def test_not_a_number_is_never_drafted():
    log_probs = log_softmax(np.random.default_rng(3).normal(size=(3, 4)))
    log_probs[1] = np.nan
    check(builder(8)(log_probs), heap_marginal(log_probs[:1], 8), 8)


def test_negative_budget_is_refused():
    with pytest.raises(ValueError, match="budget is -1"):
        build_tree(jnp.zeros((2, 4)), -1)


@pytest.mark.parametrize("budget", [3, 7, 12, 20])
def test_keep_chain(budget):
    """The chain is in, the rest are the best other prefixes, and the order is still by probability."""
    depth = 7
    rng = np.random.default_rng(4)
    for _ in range(10):
        log_probs = log_softmax(rng.normal(size=(depth, 30)))  # flat: the plain tree starves depth
        tree = builder(budget, True)(log_probs)
        everything = heap_marginal(log_probs, budget + depth)
        rows: list[list[int]] = [[]]
        for token, parent, *_ in everything:
            rows.append([*rows[parent], token])
        best = log_probs.argmax(axis=-1).tolist()
        chain_paths = [best[: d + 1] for d in range(depth)][:budget]
        others = [path for path in rows[1:] if path != best[: len(path)]][: budget - len(chain_paths)]
        assert sorted(paths(tree)) == sorted(chain_paths + others)
        cum = np.asarray(tree.cum_log_probs)
        assert (np.diff(cum) <= 0).all()
        assert (np.asarray(tree.parents)[1:] < np.arange(1, budget + 1)).all()


def test_vmap_equals_singles():
    log_probs = log_softmax(np.random.default_rng(5).normal(size=(4, 7, 33)) * 2)
    roots = jnp.array([5, 6, 7, 8])
    trees = jax.jit(jax.vmap(lambda x, root: build_tree(x, 16, root=root)))(log_probs, roots)
    for r in range(4):
        single = builder(16)(log_probs[r], roots[r])
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, r=r: x[r], trees), single)
        assert int(single.tokens[0]) == 5 + r


def test_truncate_and_resize_give_the_smaller_tree():
    log_probs = log_softmax(np.random.default_rng(6).normal(size=(7, 33)) * 2)
    tree = builder(32)(log_probs)
    for n in (0, 7, 32):
        small = builder(n)(log_probs)
        check(truncate(tree, n), heap_marginal(log_probs, n), 32)
        jax.tree.map(np.testing.assert_array_equal, resize(tree, n + 1), small)
        jax.tree.map(np.testing.assert_array_equal, resize(small, 33), truncate(tree, n))


def test_chain_is_the_peaked_tree():
    case = next(case for case in CASES if case["name"].startswith("peaked_chain"))
    log_probs = log_softmax(case["logprobs"])
    values, ids = log_probs.max(axis=-1), log_probs.argmax(axis=-1)
    tree = chain(jnp.asarray(values), jnp.asarray(ids))
    check(tree, [(n["token"], n["parent"], n["depth"], n["cum_logprob"]) for n in case["nodes"]], 7)
    check(chain(jnp.asarray(values), jnp.asarray(ids), 3), heap_marginal(log_probs, 3), 3)
    check(chain(jnp.asarray(values), jnp.asarray(ids), 9), heap_marginal(log_probs, 7), 9)


@pytest.mark.parametrize("k", [1, 5, 16])
def test_sharded_vocabulary_equals_whole(k):
    """Vocabulary over tp = 4; ties across shards included, k larger than a shard's share included."""
    rng = np.random.default_rng(7)
    logits = np.round(rng.normal(size=(2, 7, 40)) * 3).astype(np.float32) + 0.0  # no -0.0, which top_k ranks below 0
    logits[..., 3] = logits[..., 33] = 20
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    spec = PartitionSpec(None, None, "tp")

    def top(x):
        return top_log_probs(x, k)

    sharded = jax.jit(jax.shard_map(top, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False))
    values, ids = sharded(logits)
    expected = log_softmax(logits)
    order = np.argsort(-expected, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, axis=-1), atol=2e-6)
    whole = top(logits)
    np.testing.assert_array_equal(whole[1], order)
    tree = jax.jit(build_from_top_k, static_argnums=2)(values[0], ids[0], k)
    np.testing.assert_array_equal(tree.tokens, builder(k)(expected[0]).tokens)


def test_conditional_lattice_against_a_heap():
    """Scores that depend on the parent: the tree is exact within the lattice, where rank pruning would not be."""
    rng = np.random.default_rng(8)
    for _ in range(40):
        conditional = log_softmax(rng.normal(size=(5, 6, 6)) * 2.5)
        ids = np.stack([rng.permutation(50)[:6] for _ in range(5)])
        nodes = heap_tree(lambda d, parent, c=conditional: c[d - 1, parent if d > 1 else 0], ids, 24)
        check(lattice_builder(conditional, ids, budget=24), nodes, 24)


def test_conditional_lattice_keeps_the_greedy_chain():
    rng = np.random.default_rng(9)
    conditional = log_softmax(rng.normal(size=(5, 6, 6)))
    ids = np.stack([rng.permutation(50)[:6] for _ in range(5)])
    rank, greedy = 0, []
    for d in range(5):
        rank = int(conditional[d, rank if d else 0].argmax())
        greedy.append(int(ids[d, rank]))
    values, tokens = greedy_path(conditional, ids)
    assert tokens.tolist() == greedy
    best = [0, *[list(ids[d]).index(greedy[d]) for d in range(5)]]
    np.testing.assert_array_equal(values, [conditional[d, best[d], best[d + 1]] for d in range(5)])
    found = paths(lattice_builder(conditional, ids, budget=8, keep_chain=True))
    assert all(greedy[: d + 1] in found for d in range(5))
    assert len(found) == 8


def test_conditional_with_independent_positions_is_the_plain_tree():
    log_probs = log_softmax(np.random.default_rng(10).normal(size=(6, 12)))
    values, ids = jax.lax.top_k(log_probs, 12)
    lattice = jnp.broadcast_to(values[:, None], (6, 12, 12))
    jax.tree.map(np.testing.assert_array_equal, lattice_builder(lattice, ids, budget=12), builder(12)(log_probs))
