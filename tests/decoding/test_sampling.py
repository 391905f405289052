"""The sampler's law against the exact distribution, its filters against a plain definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.decoding.sampling import (
    Sampling,
    Samplings,
    filtered,
    log_probabilities,
    next_tokens,
    not_yet,
    only_known,
    request_keys,
)

pytestmark = pytest.mark.core

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], np.float32)


def drawn(logits, positions, keys, sampling, kind="filters"):
    return next_tokens(logits, positions, keys, Samplings.of([sampling] * len(logits)), kind)


def probabilities(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature):
    draws = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (draws, 1, 6))
    tokens, finite = drawn(
        logits,
        jnp.zeros((draws, 1), jnp.int32),
        request_keys([0] * draws, range(draws)),
        Sampling(temperature=temperature),
    )
    expected = probabilities(LOGITS / temperature) * draws
    observed = np.bincount(np.asarray(tokens).ravel(), minlength=6)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 99.9 % quantile with 5 degrees of freedom; a bias of 2 % in one token gives about 30
    assert finite.all()


def test_positions_draw_independently():
    positions = jnp.arange(4000)[None]
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (1, 4000, 6))
    tokens = np.asarray(drawn(logits, positions, request_keys([0], [0]), Sampling(temperature=1.0))[0])[0]
    p = probabilities(LOGITS)
    pairs = np.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36)
    expected = np.outer(p, p).ravel() * 3999
    common = expected > 5
    assert ((pairs - expected)[common] ** 2 / expected[common]).sum() < 60  # 99.9 % quantile is below for 30 cells


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0), [0, 1, 2, 3, 4, 5]),
        (Sampling(temperature=1.0, top_k=2), [0, 1]),
        (Sampling(temperature=1.0, top_k=100), [0, 1, 2, 3, 4, 5]),
        (Sampling(temperature=1.0, top_p=0.5), [0]),
        (Sampling(temperature=1.0, top_p=0.60), [0, 1]),
        (Sampling(temperature=1.0, min_p=0.2), [0, 1, 2]),
        (Sampling(temperature=1.0, top_k=3, top_p=0.99, min_p=0.3), [0, 1]),
        (Sampling(temperature=0.25, min_p=0.1), [0]),
    ],
)
def test_filters_keep_what_their_definitions_say(sampling, kept):
    # p = 0.571, 0.210, 0.127, 0.077, 0.028, 0.004 at temperature 1
    shuffle = np.array([3, 0, 5, 1, 4, 2])
    logits = jnp.asarray(LOGITS[shuffle] / np.float32(sampling.temperature))
    result = np.asarray(filtered(logits[None, None], Samplings.of([sampling])))[0, 0]
    assert sorted(shuffle[np.isfinite(result)]) == kept
    finite = np.isfinite(result)
    np.testing.assert_allclose(result[finite], (LOGITS[shuffle] / sampling.temperature)[finite])


def test_greedy_takes_the_lower_id_of_equals_and_notices_nan():
    logits = jnp.asarray([[[0.0, 2.0, 2.0, 1.0], [0.0, np.nan, 1.0, 2.0]]])
    tokens, finite = drawn(logits, jnp.zeros((1, 2), jnp.int32), request_keys([0], [0]), Sampling())
    assert int(tokens[0, 0]) == 1
    assert finite.tolist() == [[True, False]]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=5e-324),
        Sampling(temperature=1e-38),
        Sampling(temperature=1e-30),
        Sampling(temperature=1.0, top_p=1e-300),
        Sampling(temperature=1.0, top_p=5e-324, top_k=3, min_p=1.0),
        Sampling(temperature=1e30, top_k=1),
        Sampling(temperature=1.0, min_p=1.0),
    ],
    ids=str,
)
def test_extreme_settings_leave_the_most_likely_token(sampling):
    for scale in (1.0, 1e4):
        logits = scale * jnp.asarray(LOGITS)[None, None, ::-1]
        tokens, finite = drawn(logits, jnp.zeros((1, 1), jnp.int32), request_keys([0], [0]), sampling)
        assert tokens.tolist() == [[5]]
        assert finite.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e30])
def test_ids_beyond_the_known_ones_have_no_probability(temperature):
    logits = jnp.broadcast_to(jnp.asarray([0.0, 1.0, 50.0, 60.0]), (500, 1, 4))
    keys = request_keys([0] * 500, range(500))
    tokens, finite = drawn(only_known(logits, 2), jnp.zeros((500, 1), jnp.int32), keys, Sampling(temperature))
    assert set(tokens.ravel().tolist()) == ({1} if temperature == 0 else {0, 1})
    assert finite.all()
    assert only_known(logits, None) is logits


def test_every_bit_of_a_seed_and_the_sample_number_count():
    seeds = [0, 1, 1 << 31, 1 << 32, 1 << 33, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, -1, -(1 << 63)]
    keys = request_keys([*seeds, *seeds], [0] * len(seeds) + [1] * len(seeds))
    assert len({tuple(key) for key in keys.tolist()}) == 2 * len(seeds)
    assert request_keys([1 << 33], [1]).tolist() == [keys[len(seeds) + 4].tolist()], "alone or among others"
    halves = np.array([(seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF) for seed in seeds], np.uint32)
    samples = np.array([0, 1, 2, 3, 7, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1], np.uint32)
    folded = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(halves, impl="threefry2x32"), samples)
    np.testing.assert_array_equal(request_keys(seeds, samples.tolist()), jax.random.key_data(folded))


@pytest.mark.parametrize("seed", [1 << 63, -(1 << 63) - 1, 1.0, "1", None])
def test_seeds_that_do_not_fit_are_refused(seed):
    with pytest.raises(
        ValueError, match=r"seed is .* must (be an integer|lie in -9223372036854775808 \.\. 92233720368)"
    ):
        request_keys([seed], [0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("top_k", -1), ("top_k", 1.5), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2.0)]
    + [("temperature", 1e31)]
    + [(field, value) for field in ("temperature", "top_p", "min_p") for value in (np.nan, np.inf, -np.inf)],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


KINDS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.6, top_k=40),
    Sampling(1.3, top_p=0.9),
    Sampling(0.7, min_p=0.05),
    Sampling(0.8, 50, 0.95, 0.01),
]


def test_requests_of_all_kinds_draw_in_one_program_what_each_draws_alone():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.standard_normal((len(KINDS), 16, 300)), jnp.float32)
    positions = jnp.asarray(rng.integers(0, 1000, (len(KINDS), 16)), jnp.int32)
    keys = request_keys([7] * len(KINDS), range(len(KINDS)))
    together, _ = next_tokens(logits, positions, keys, Samplings.of(KINDS))
    for row, sampling in enumerate(KINDS):
        one = slice(row, row + 1)
        kind = "greedy" if sampling.greedy else "filters" if sampling.filters else "temperature"
        alone, _ = drawn(logits[one], positions[one], keys[one], sampling, kind)
        assert together[one].tolist() == alone.tolist(), sampling


def test_log_probabilities_are_those_of_the_softmax():
    logits = 5 * np.random.default_rng(1).standard_normal((3, 4, 50)).astype(np.float32)
    tokens = np.arange(12).reshape(3, 4)
    expected = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    chosen, ids, best = log_probabilities(jnp.asarray(logits), jnp.asarray(tokens), 5)
    np.testing.assert_allclose(chosen, np.take_along_axis(expected, tokens[..., None], -1)[..., 0], atol=1e-5)
    order = np.argsort(-expected, axis=-1)[..., :5]
    assert ids.tolist() == order.tolist()
    np.testing.assert_allclose(best, np.take_along_axis(expected, order, -1), atol=1e-5)


def test_stop_tokens_are_not_drawn_early():
    logits = jnp.asarray([[[0.0, 9.0, 1.0, 2.0]] * 2, [[0.0, 9.0, 1.0, 2.0]] * 2])
    early = jnp.asarray([[True, False], [True, True]])
    kept = not_yet(logits, jnp.asarray([[1, -1], [3, 1]]), early)
    assert jnp.argmax(kept, -1).tolist() == [[3, 1], [2, 2]]
    assert kept[0, 1].tolist() == logits[0, 1].tolist()
