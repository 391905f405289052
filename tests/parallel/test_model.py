"""The whole model with every exchange, against transformers' logits in float32 (tolerance as in tests/model)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import ModelConfig
from kimi_jax.decoding.generate import Limits
from kimi_jax.decoding.loading import model_for, open_checkpoint
from kimi_jax.decoding.report import Report
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.model.rows import causal_rows
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.exchange import all_to_all
from kimi_jax.parallel.sharding import REQUESTS, rules
from kimi_jax.parameters import bind, specs
from meshes.devices import build_mesh
from meshes.presets import Layout, preset
from tests.parallel.random_model import random_weights

TINY = Path(__file__).parents[1] / "data" / "tiny_random"
HGX = preset("hgx-ib-16")
NVL72 = preset("nvl72")


@pytest.mark.parametrize(
    ("machine", "exchange", "experts"),
    [
        pytest.param(HGX, "alltoall", "slots", id="hgx-ib-16 alltoall"),
        pytest.param(HGX, "allgather", "width", id="hgx-ib-16 width"),
        *(
            pytest.param(machine, exchange, "slots", id=name, marks=pytest.mark.slow)
            for name, machine, exchange in (
                ("hgx-ib-16 wide ep alltoall", HGX.with_axes(dp=1, ep=16, tp=1), "alltoall"),
                ("nvl36 alltoall", preset("nvl36"), "alltoall"),
                ("nvl72 alltoall", NVL72, "alltoall"),
                ("nvl72 auto", NVL72, "auto"),
                ("nvl72 ep 72 alltoall", NVL72.with_axes(dp=1, ep=72, tp=1), "alltoall"),
                ("nvl72 dp 9", NVL72.with_axes(dp=9, ep=1, tp=8), "alltoall"),
            )
        ),
    ],
)
def test_logits(machine, exchange, experts, forward, reference):
    layout = dataclasses.replace(machine.layout, exchange=exchange, experts=experts)
    machine = machine.with_layout(layout)
    engine = open_checkpoint(TINY, build_mesh(machine, jax.devices()), layout, jnp.float32)
    ids = reference["input_ids"]
    count, length = ids.shape
    rows = causal_rows(jnp.asarray(ids), jnp.zeros(count, jnp.int32), jnp.full(count, length, jnp.int32))
    np.testing.assert_allclose(forward(engine, rows).logits, reference["logits"], atol=1e-4)


def test_overflows_are_counted_and_change_nothing(reference, monkeypatch):
    """Buffers of one row: every exchange of the two prefill chunks overflows, and none of a round of one row."""
    monkeypatch.setattr(all_to_all, "buffer_rows", lambda *sizes, **options: 1)
    layout = Layout(dp=2, ep=2, tp=2, exchange="alltoall")
    machine = preset("local").with_layout(layout)
    engine = open_checkpoint(TINY, build_mesh(machine, jax.devices()), layout, jnp.float32)
    ids, limits = reference["greedy_ids"], Limits(max_new_tokens=6, prefill_chunk=16)
    prompts = ids[:, :20].tolist()
    assert len(prompts) > 2, "both replicas have some"
    report, texts = Report(len(prompts)), [[] for _ in prompts]
    for progress in engine.generate(prompts, limits, Sampling()):
        report.add(progress)
        for text, new in zip(texts, progress.new_tokens, strict=True):
            text += new
    assert texts == ids[:, 20:26].tolist()
    # Three layers of experts on two replicas, whose two tp ranks exchange apart.
    summary = report.as_dict()
    assert summary["exchanges"] == (2 + report.rounds) * 3 * 2 * 2
    assert summary["overflows"] == 2 * 3 * 2 * 2
    assert f"24 of {summary['exchanges']} exchanges through buffers overflowed" in report.details()


@pytest.mark.parametrize("sampling", [Sampling(), pytest.param(Sampling(0.9), marks=pytest.mark.slow)])
def test_rounds_that_overflow_are_run_again(sampling, reference, monkeypatch):
    """Buffers of one row for twins, whose rows choose alike: rounds overflow, and texts are those of one device."""
    ids, limits = reference["greedy_ids"], Limits(max_new_tokens=6, prefill_chunk=32)
    prompts = [prompt for prompt in ids[:, :20].tolist() for _ in range(2)]

    def run(layout):
        machine = preset("local").with_layout(layout)
        engine = open_checkpoint(TINY, build_mesh(machine, jax.devices()), layout, jnp.float32)
        report, texts = Report(len(prompts)), [[] for _ in prompts]
        for progress in engine.generate(prompts, limits, sampling, seed=3):
            report.add(progress)
            for text, new in zip(texts, progress.new_tokens, strict=True):
                text += new
        return texts, report

    expected = ids[:, 20:26].tolist() if sampling.greedy else None
    alone = [text for text in expected for _ in range(2)] if expected else run(Layout())[0]
    monkeypatch.setattr(all_to_all, "buffer_rows", lambda *sizes, **options: 1)
    texts, report = run(Layout(ep=2, tp=2, exchange="alltoall"))
    assert texts == alone
    assert report.rounds == 5, "a round that gives nothing is none"
    summary = report.as_dict()
    in_chunks = 3 * 2  # of three layers on two tp ranks, one chunk
    assert summary["overflows"] > in_chunks
    assert f"{summary['overflows']} of {summary['exchanges']} exchanges" in report.details()


@pytest.mark.slow
def test_tp_64_on_64_of_72():
    """A model with 64 heads and random weights, against the same on one device: one head and a 64th of widths each."""
    config = dataclasses.replace(ModelConfig.from_json(TINY), num_attention_heads=64, num_hidden_layers=2)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 9)).astype(np.int32)
    rows = causal_rows(jnp.asarray(tokens), jnp.zeros(2, jnp.int32), jnp.full(2, 9, jnp.int32))

    def logits(machine):
        layout = machine.layout
        model, mesh, places = model_for(config, layout), build_mesh(machine, jax.devices()), rules(layout)

        def forward(parameters, rows):
            bound = bind(model, parameters)
            return all_gather(bound.logits(bound.model(rows).hidden), "tp", dimension=2)

        in_specs = (specs(model, places), REQUESTS)
        run = jax.shard_map(forward, mesh=mesh, in_specs=in_specs, out_specs=REQUESTS, check_vma=False)
        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.jit(run)(random_weights(model), rows))

    one = logits(preset("local"))
    assert one.std() > 0.1
    assert NVL72.with_axes(ep=1, tp=64).layout.num_devices == 64
    np.testing.assert_allclose(logits(NVL72.with_axes(ep=1, tp=64)), one, atol=1e-4)
