"""Decode-context parallelism: a cache split over tp gives the same logits and the same text as a copied one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_jax.decoding.engine import PLAIN, Draft, Engine
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.model.pages import Latents, commit, empty_cache, places_of
from kimi_jax.model.rows import Rows, causal_rows
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.context import part_lengths
from kimi_jax.parallel.sharding import REQUESTS, cache_axis, cache_spec
from kimi_jax.parameters import bind, specs
from pallas_kernels.tree_attention import PAGE

HGX = "hgx-ib-16 split cache"
OTHERS = [
    pytest.param(f"{name} split cache", marks=pytest.mark.slow) for name in ("hgx-ib-16 replicas", "nvl36", "nvl72")
]


def step(engine: Engine, expanded: bool):
    """Rows and a cache to all logits and the cache with the rows in it."""
    rules = engine.rules

    def run(parameters, rows, cache):
        bound = bind(engine.model, parameters)
        output = bound.model(rows, cache, expanded=expanded)
        logits = all_gather(bound.logits(output.hidden), "tp", dimension=2)
        counts = rows.valid.sum(1)
        places = places_of(cache, rows.pages, rows.lengths, counts, rows.tokens.shape[1])
        return logits, commit(cache, [output.latents], [places])

    in_specs = (specs(engine.model, rules), REQUESTS, cache_spec(rules))
    out_specs = (REQUESTS, cache_spec(rules))
    return jax.jit(jax.shard_map(run, mesh=engine.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def placed(engine: Engine, rows: Rows) -> Rows:
    """Repeated until every device group has a request."""
    multiple = engine.mesh.shape["dp"] * engine.mesh.shape["ep"]
    requests = -(-rows.tokens.shape[0] // multiple) * multiple
    sharding = NamedSharding(engine.mesh, REQUESTS)
    return jax.tree.map(lambda x: jax.device_put(np.resize(np.asarray(x), (requests, *x.shape[1:])), sharding), rows)


@pytest.mark.parametrize(
    "expanded",
    [pytest.param(True, id="expanded"), pytest.param(False, id="absorbed", marks=pytest.mark.slow)],  # the text's form
)
@pytest.mark.parametrize("mesh", [HGX, *OTHERS])
def test_logits_in_chunks(mesh, expanded, engines, reference):
    """Two chunks, of 5 and the rest: no part is as long as another, and some ranks start empty."""
    engine = engines(mesh)
    ids = jnp.asarray(reference["input_ids"])
    count, length = ids.shape
    requests = placed(engine, causal_rows(ids, *[jnp.zeros(count, jnp.int32)] * 2)).tokens.shape[0]
    sharding = NamedSharding(engine.mesh, cache_spec(engine.rules))
    ranks = engine.mesh.shape["tp"]
    empty = empty_cache(engine.config, requests, jnp.float32, cache_axis(engine.rules), ranks)
    cache = jax.device_put(empty, sharding)
    assert cache[0].latent.addressable_shards[0].data.shape[1] == PAGE
    groups = engine.mesh.shape["dp"] * engine.mesh.shape["ep"]
    pages = np.arange(requests, dtype=np.int32)[:, None] % (requests // groups)  # one a request, in its group's pool
    pages = jax.device_put(pages, NamedSharding(engine.mesh, REQUESTS))
    found, run = [], step(engine, expanded)
    with jax.default_matmul_precision("highest"):
        for first, end in ((0, 5), (5, length)):
            fill = jnp.full(count, first, jnp.int32)
            rows = placed(engine, causal_rows(ids[:, first:end], fill, jnp.full(count, end - first, jnp.int32)))
            rows = dataclasses.replace(rows, pages=pages)
            logits, cache = run(engine.parameters["target"], rows, cache)
            found.append(np.asarray(logits)[:count])
    np.testing.assert_allclose(np.concatenate(found, axis=1), reference["logits"], atol=1e-4)


def texts(engine, prompts, limits, draft=PLAIN):
    out = [[] for _ in prompts]
    for progress in engine.generate(prompts, limits, Sampling(), draft=draft):
        for row, new in enumerate(progress.new_tokens):
            out[row] += new
    return out


@pytest.mark.parametrize(
    ("mesh", "draft"),
    [
        pytest.param(HGX, Draft("ddtree", 16), id="tree", marks=pytest.mark.slow),
        *(pytest.param(HGX, draft, id=name, marks=pytest.mark.slow) for name, draft in
          (("plain", PLAIN), ("chain", Draft("chain")), ("auto budget", Draft("ddtree", 64)))),
        *(pytest.param(*mesh.values, Draft("ddtree", 16), id=str(mesh.values[0]), marks=pytest.mark.slow)
          for mesh in OTHERS),
    ],
)  # fmt: skip
def test_greedy_text_is_the_references(mesh, draft, engines, reference):
    """Prompts of several lengths: the reference's first 8 tokens, and some of what it goes on with."""
    texts_of = reference["greedy_ids"].tolist()
    lengths = [8 + 3 * index for index in range(len(texts_of))]
    prompts = [ids[:length] for ids, length in zip(texts_of, lengths, strict=True)]
    expected = [ids[length : length + 12] for ids, length in zip(texts_of, lengths, strict=True)]
    assert texts(engines(mesh), prompts, Limits(max_new_tokens=12, prefill_chunk=7), draft) == expected


def test_positions_lie_on_the_ranks_in_turn():
    """Rows land where `part_lengths` counts them: rank r holds positions r, r + 4, … in order, and no others."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    spec = PartitionSpec(None, "tp")
    positions = np.arange(32)
    lengths, chunk = np.array([0, 1, 6, 27]), 5  # the last chunk reaches the capacity exactly
    values = np.broadcast_to(positions[None, :, None].astype(np.float32), (4, 32, 2)) + 100

    def write(lengths):
        latents = [Latents(jnp.zeros((4, 8, 2)), jnp.zeros((4, 8, 1)), "tp")]
        pages = jnp.arange(4)[:, None]
        for first in range(0, 32, chunk):
            width = min(chunk, 32 - first)
            index = first + jnp.arange(width)
            new = jnp.broadcast_to(index[None, :, None] + 100.0, (4, width, 2))
            # Every request is written up to its own length and one chunk on, as a round writes rejected rows.
            start = jnp.where(first <= lengths, first, 32)
            places = places_of(latents, pages, start, jnp.full(4, width), width)
            latents = commit(latents, [[Latents(new, new[..., :1])]], [places])
        return latents[0].latent, part_lengths(lengths, "tp")[:, None]

    run = jax.jit(jax.shard_map(write, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False))
    cached, counts = map(np.asarray, run(lengths))
    for request, length in enumerate(lengths):
        for rank in range(4):
            held = positions[positions % 4 == rank]
            filled = held[held < length]
            assert counts[request, rank] == len(filled)
            part = cached[request, 8 * rank : 8 * rank + 8]
            np.testing.assert_array_equal(part[: len(filled)], values[request, filled])
            written = held < (length // chunk + 1) * chunk
            np.testing.assert_array_equal(part[:, 0], np.where(written, held + 100, 0))
