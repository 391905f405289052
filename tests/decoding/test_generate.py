"""Decoding end to end on the tiny checkpoint, in float32: the reference's text, and the same however it is run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.generate import Limits, NonFiniteLogitsError
from kimi_jax.decoding.sampling import Sampling

pytestmark = pytest.mark.core

GREEDY = Sampling()


def texts(engine: Engine, prompts, limits, sampling=GREEDY, seed=0, samples=None):
    out = [[] for _ in prompts]
    for progress in engine.generate(prompts, limits, sampling, seed, samples=samples):
        for row, new in enumerate(progress.new_tokens):
            out[row] += new
    return out


@pytest.fixture(scope="module")
def prompts(reference):
    """At most 16 tokens each: with answers of one page at most, all calls with as many prompts share programs."""
    ids = reference["input_ids"].tolist()
    return [ids[0][:16], ids[1][:9], ids[2][:1], ids[0][5:17]]


def test_greedy_continuation_is_the_references(engines, reference):
    ids = reference["greedy_ids"]  # prompts of 8 tokens and what follows them, free of ties and of special tokens
    assert texts(engines(), ids[:, :8].tolist(), Limits(max_new_tokens=24)) == ids[:, 8:].tolist()


@pytest.mark.parametrize("mesh", ["hgx-ib-16", "nvl72"])
def test_same_text_on_every_mesh(mesh, shallow, prompts):
    limits = Limits(max_new_tokens=10)
    assert texts(shallow(mesh), prompts, limits) == texts(shallow(), prompts, limits)


def test_a_batch_gives_what_each_prompt_gives_alone(shallow, prompts):
    limits, engine = Limits(max_new_tokens=12), shallow()
    together = texts(engine, prompts, limits)
    assert together == [texts(engine, [prompt], limits)[0] for prompt in prompts]
    assert len({tuple(text) for text in together}) == len(prompts)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prefill_in_chunks_of_any_size(chunk, shallow, prompts):
    limits = Limits(max_new_tokens=8)
    expected = texts(shallow(), prompts, limits)
    assert texts(shallow(), prompts, dataclasses.replace(limits, prefill_chunk=chunk)) == expected


@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_rounds_per_dispatch_do_not_matter(rounds, shallow, prompts):
    limits = Limits(max_new_tokens=9)
    expected = texts(shallow(), prompts, limits)
    assert texts(shallow(), prompts, dataclasses.replace(limits, rounds_per_dispatch=rounds)) == expected


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_new_tokens_is_exact(limit, shallow, prompts):
    assert [len(text) for text in texts(shallow(), prompts, Limits(max_new_tokens=limit))] == [limit] * len(prompts)


def test_a_stop_token_ends_its_text_and_no_other(shallow, prompts, served):
    engine = shallow()
    free = texts(engine, prompts, Limits(max_new_tokens=12))
    stop = free[0][5]
    out = served(engine, engine.programs(), prompts, Limits(max_new_tokens=12), stop_ids=(stop,)).texts
    for text, unstopped in zip(out, free, strict=True):
        end = unstopped.index(stop) + 1 if stop in unstopped else len(unstopped)
        assert text == unstopped[:end]
    assert any(len(text) < 12 for text in out)


def test_sampling_is_reproducible_by_seed_whatever_the_batch_and_the_mesh(shallow, prompts):
    sampling, limits = Sampling(temperature=1.0, top_p=0.95), Limits(max_new_tokens=8)
    first = texts(shallow(), prompts, limits, sampling, seed=3)
    assert texts(shallow(), prompts, limits, sampling, seed=3) == first
    assert texts(shallow(), prompts[:1], limits, sampling, seed=3) == first[:1]
    assert texts(shallow("hgx-ib-16"), prompts, limits, sampling, seed=3) == first
    assert texts(shallow(), prompts, limits, sampling, seed=4) != first
    behind = texts(shallow(), prompts[::-1], limits, sampling, seed=3)
    assert behind[::-1] == first
    for mesh in ("local", "hgx-ib-16"):
        assert [texts(shallow(mesh), [prompt], limits, sampling, seed=3)[0] for prompt in prompts] == first
    assert texts(shallow(), prompts[:1], limits, sampling, seed=3 + (1 << 32)) != first[:1]


def test_each_prompt_has_its_own_seed_and_sample_number(shallow, prompts):
    sampling, limits, prompt = Sampling(temperature=1.0), Limits(max_new_tokens=8), prompts[0]
    seeds = [5, 1 << 40, -1]
    alone = [texts(shallow(), [prompt], limits, sampling, seed=seed)[0] for seed in seeds]
    assert len({tuple(text) for text in alone}) == 3
    for engine in (shallow(), shallow("hgx-ib-16")):
        assert texts(engine, [prompt] * 4, limits, sampling, seed=[*seeds, 5]) == [*alone, alone[0]]
    numbered = texts(shallow(), [prompt] * 3, limits, sampling, seed=5, samples=[2, 0, 1])
    assert numbered[1] == alone[0]
    assert len({tuple(text) for text in numbered}) == 3
    with pytest.raises(ValueError, match="2 seeds for 1 prompts"):
        texts(shallow(), [prompt], limits, sampling, seed=[1, 2])
    with pytest.raises(ValueError, match="seed is 9223372036854775808"):
        texts(shallow(), [prompt], limits, sampling, seed=1 << 63)


@pytest.mark.parametrize("kind", [np.int32, np.uint16, tuple])
def test_prompts_may_be_integer_arrays(kind, shallow, prompts):
    rows = [tuple(prompt) if kind is tuple else np.asarray(prompt, kind) for prompt in prompts]
    assert texts(shallow(), rows, Limits(max_new_tokens=4)) == texts(shallow(), prompts, Limits(max_new_tokens=4))


def test_a_tiny_temperature_is_greedy(shallow, prompts):
    limits = Limits(max_new_tokens=8)
    assert texts(shallow(), prompts, limits, Sampling(temperature=1e-4)) == texts(shallow(), prompts, limits)


def test_weights_that_are_not_finite_are_an_error_and_not_a_token(shallow, prompts):
    engine = shallow()
    broken = jax.tree.map(lambda x: x, engine.parameters)
    norm = broken["target"]["model"]["norm"]
    norm["weight"] = norm["weight"] * jnp.nan
    engine = dataclasses.replace(engine, parameters=broken)
    with pytest.raises(NonFiniteLogitsError, match=r"prompt 1.*position 15"):
        texts(engine, prompts[:1], Limits(max_new_tokens=4))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no prompt"),
        ([[1], []], "prompt 2 is empty"),
        ([[1, 576]], "outside 0..575"),
        ([[1, -1]], "outside"),
        ([[1], [1.0, 2.5]], r"prompt 2 is \[1\.0, 2\.5\]; it must be a row of integer ids"),
        ([np.ones(3)], "integer ids"),
        ([["1"]], "integer ids"),
        ([[True]], "integer ids"),
        ([[[1], [2]]], "integer ids"),
        ([1, 2], "integer ids"),
        ([[float("nan")]], "integer ids"),
        ([[1 << 70]], "integer ids"),
    ],
)
def test_prompts_that_cannot_run_are_refused(bad, message, shallow):
    with pytest.raises(ValueError, match=message):
        texts(shallow(), bad, Limits(max_new_tokens=2))


def test_a_prompt_beyond_the_models_positions_is_refused(shallow):
    engine = shallow()
    with pytest.raises(ValueError, match="262144 positions"):
        texts(engine, [[1, 2]], Limits(max_new_tokens=262_143))


@pytest.mark.parametrize("field", ["max_new_tokens", "prefill_chunk", "rounds_per_dispatch"])
def test_limits_must_be_positive(field):
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})
