"""What `explain` says of bytes and messages, against published sizes and against the compiled programs."""

import dataclasses
import functools
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from kimi_jax.config import ModelConfig
from kimi_jax.decoding.engine import Draft, model_for
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.model.cache import empty_cache
from kimi_jax.model.transformer import causal_rows
from kimi_jax.parallel.explain import cache_bytes, explain, held_weights
from kimi_jax.parallel.messages import drafter_messages, forward_messages, head_messages
from kimi_jax.parallel.sharding import REQUESTS, cache_axis, cache_spec, rules
from kimi_jax.parameters import abstract, bind, specs
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.messages import collectives
from meshes.devices import build_mesh
from meshes.presets import LayoutError, Preset, preset

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "kimi_jax" / "assets"
TINY = ROOT / "tests" / "data" / "tiny_random"
ROWS = 6


def with_exchange(machine: Preset, exchange: str, experts: str = "slots") -> Preset:
    return machine.with_layout(dataclasses.replace(machine.layout, exchange=exchange, experts=experts))


HGX = preset("hgx-ib-16")

# Of a forward of two layers, one dense and one of experts, 6 rows a device, hidden 128, top-4, float32: kind, axes,
# count, bytes. A sum over tp moves 6 × 128 × 4 = 3,072 bytes: the embedding, and two a layer. Gathered rows have 8
# more words (ids and weights), rows in buffers 9 (the word on overflow): 6 × 136 × 4 × ep; rows back 6 × 128 × 4 × ep.
GOLDEN = {
    "local": (preset("local"), []),
    "hgx-ib-16": (
        HGX,
        [
            ("all-gather", ("ep",), 1, 2 * 3264),
            ("all-reduce", ("tp",), 5, 3072),
            ("reduce-scatter", ("ep",), 1, 2 * 3072),
        ],
    ),
    "hgx-ib-16 replicas": (HGX.with_axes(dp=2, ep=1, tp=8), [("all-reduce", ("tp",), 5, 3072)]),
    "hgx-ib-16 width": (
        with_exchange(HGX.with_axes(dp=2, ep=1, tp=8), "tensor", "width"),
        [("all-reduce", ("tp",), 5, 3072)],
    ),
    "nvl36": (
        preset("nvl36"),
        [
            ("all-gather", ("ep",), 1, 9 * 3264),
            ("all-reduce", ("tp",), 5, 3072),
            ("reduce-scatter", ("ep",), 1, 9 * 3072),
        ],
    ),
    "nvl72": (
        preset("nvl72"),
        [
            ("all-gather", ("ep",), 1, 9 * 3264),
            ("all-reduce", ("tp",), 5, 3072),
            ("reduce-scatter", ("ep",), 1, 9 * 3072),
        ],
    ),
    "nvl72 ep 72": (
        preset("nvl72").with_axes(dp=1, ep=72, tp=1),
        [("all-gather", ("ep",), 1, 72 * 3264), ("reduce-scatter", ("ep",), 1, 72 * 3072)],
    ),
    "nvl72 dp 9": (preset("nvl72").with_axes(dp=9, ep=1, tp=8), [("all-reduce", ("tp",), 5, 3072)]),
    # Queries of all 8 heads have 32 + 8 values, outputs 32 and a log-sum-exp: 6 × 8 × 40 × 4 and 6 × 8 × 33 × 4 bytes.
    "hgx-ib-16 split cache": (
        HGX.with_layout(dataclasses.replace(HGX.with_axes(dp=2, ep=1).layout, cache="split")),
        [
            ("all-gather", ("tp",), 2, 7680),
            ("all-reduce", ("tp",), 5, 3072),
            ("all-to-all", ("tp",), 2, 6336),
        ],
    ),
    "hgx-ib-16 alltoall": (
        with_exchange(HGX, "alltoall"),
        [("all-reduce", ("tp",), 5, 3072), ("all-to-all", ("ep",), 1, 2 * 3072), ("all-to-all", ("ep",), 1, 2 * 3288)],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_table_of_collectives(name):
    """An extra collective in the compiled forward fails, and so does one that `forward_messages` does not tell of."""
    machine, golden = GOLDEN[name]
    config = dataclasses.replace(ModelConfig.from_json(TINY), num_hidden_layers=2)
    layout = machine.layout
    model = model_for(config, layout)
    told = [
        (m.kind, m.axes, m.count, m.bytes)
        for m in forward_messages(config, layout, ROWS, jnp.float32, model.placement.num_slots)
    ]
    joined: dict[tuple, int] = {}
    for kind, axes, count, size in told:
        joined[kind, axes, size] = joined.get((kind, axes, size), 0) + count
    assert sorted((kind, axes, count, size) for (kind, axes, size), count in joined.items()) == golden
    found = collectives(Module(compiled_forward(machine, model)), layout.axis_sizes)
    assert sorted((c.kind, c.axes, c.count, c.bytes) for c in merged(found)) == golden


def test_the_exact_path_behind_buffers_is_not_counted():
    """Buffers of 35 for 48 rows may overflow: the compiled program holds both exchanges, and a step takes one."""
    machine, rows = with_exchange(HGX.with_axes(dp=1, ep=16, tp=1), "alltoall"), 48
    config = dataclasses.replace(ModelConfig.from_json(TINY), num_hidden_layers=2)
    model, layout = model_for(config, machine.layout), machine.layout
    told = forward_messages(config, layout, rows, jnp.float32, model.placement.num_slots)
    module = Module(compiled_forward(machine, model, rows))
    found = sorted((c.kind, c.axes, c.count, c.bytes) for c in collectives(module, layout.axis_sizes))
    assert found == sorted((m.kind, m.axes, m.count, m.bytes) for m in told)
    assert {kind for kind, *_ in found} == {"all-to-all"}
    held = {instruction.opcode for instruction in module.reachable()}
    assert {"all-to-all", "all-gather", "reduce-scatter"} <= held


def merged(collectives):
    """Without the parts: the table counts messages, wherever they stand."""
    counts: dict[tuple, int] = {}
    for c in collectives:
        counts[c.kind, c.axes, c.bytes] = counts.get((c.kind, c.axes, c.bytes), 0) + c.count
    first = {(c.kind, c.axes, c.bytes): c for c in collectives}
    return [dataclasses.replace(first[key], count=count) for key, count in counts.items()]


def compiled_forward(machine: Preset, model, rows: int = ROWS) -> str:
    mesh, places = build_mesh(machine, jax.devices()), rules(machine.layout)
    requests = machine.layout.dp * machine.layout.ep

    def forward(parameters, rows, cache):
        return bind(model, parameters).model(rows, cache).hidden

    in_specs = (specs(model, places), REQUESTS, cache_spec(places))
    run = jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=in_specs, out_specs=REQUESTS, check_vma=False))
    tokens = jax.ShapeDtypeStruct((requests, rows), jnp.int32)
    counts = jax.ShapeDtypeStruct((requests,), jnp.int32)
    batch = jax.eval_shape(causal_rows, tokens, counts, counts)
    axis = cache_axis(places)
    cache = jax.eval_shape(functools.partial(empty_cache, model.config, requests, 8, jnp.float32, axis))
    return run.lower(abstract(model, jnp.float32, mesh, places), batch, cache).compile().as_text()


@pytest.mark.parametrize(
    "name",
    ["hgx-ib-16 split cache", "hgx-ib-16", "nvl36", "nvl72"],
)
@pytest.mark.slow
def test_a_round_sends_what_is_told(name, engines):
    """Layers, head and drafter together are all messages of a compiled round that drafts and verifies a tree."""
    engine, budget, requests = engines(name), 7, 1
    programs = engine.programs(Sampling(), Draft("ddtree", budget))
    layout, slots = engine.layout, engine.model.placement.num_slots
    batch = programs.request_multiple
    start = functools.partial(programs.start, capacity=programs.cache_multiple, max_new_tokens=8)
    state = jax.eval_shape(
        start, jax.ShapeDtypeStruct((batch, 2), jnp.uint32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    )
    parameters = {name: engine.parameters[name] for name in programs.needs}
    text = programs.round.lower(parameters, state).compile().as_text()
    assert engine.drafter is not None
    told = [
        *forward_messages(engine.config, layout, requests * (budget + 1), jnp.float32, slots),
        *head_messages(engine.config, layout, requests * (budget + 1)),
        *drafter_messages(engine.drafter.config, layout, requests, budget, jnp.float32),
    ]
    expected: dict[tuple, int] = {}
    for m in told:
        expected[m.kind, m.axes, m.bytes] = expected.get((m.kind, m.axes, m.bytes), 0) + m.count
    found = merged(collectives(Module(text), layout.axis_sizes))
    assert {(c.kind, c.axes, c.bytes): c.count for c in found} == expected


@pytest.mark.parametrize("context", [8192, 8190])
def test_a_split_cache_is_a_tp_th(k26, context):
    copied = preset("nvl72").layout
    split = dataclasses.replace(copied, cache="split")
    assert cache_bytes(k26, copied, jnp.bfloat16, context) == context * 61 * 576 * 2
    assert cache_bytes(k26, split, jnp.bfloat16, context) == 1024 * 61 * 576 * 2


@pytest.fixture(scope="session")
def k26() -> ModelConfig:
    return ModelConfig.from_json(ASSETS / "k26_config.json")


def test_one_device_of_k26_holds_the_published_bytes(k26):
    """570.76 GB of routed experts (60 layers × 384 × 24,772,608 bytes) and 21.09 + 2.35 GB of everything else."""
    held = held_weights(model_for(k26, preset("local").layout), preset("local").layout, jnp.bfloat16)
    experts = sum(entry.device_bytes for entry in held if entry.part == "routed experts")
    assert experts == 60 * 384 * 24_772_608
    rest = sum(entry.device_bytes for entry in held if entry.part != "routed experts")
    assert rest / 1e9 == pytest.approx(21.09 + 2.35, abs=0.01)


def test_bytes_of_a_device_on_nvl72(k26):
    layout = preset("nvl72").layout
    held = {(e.part, e.axes): e for e in held_weights(model_for(k26, layout), layout, jnp.bfloat16)}
    assert held["routed experts", ("ep", "tp")].device_bytes == 60 * 6 * 24_772_608
    assert held["head", ("tp",)].device_bytes == 163840 * 7168 * 2 // 8
    assert held["router", ()].device_bytes == 60 * (384 * 7168 * 2 + 384 * 4)


def test_the_explanation_names_every_part(k26):
    console = Console(record=True, width=160, file=io.StringIO())
    layout = with_exchange(preset("nvl72").with_axes(dp=1, ep=72, tp=1), "auto")
    model = model_for(k26, layout.layout)
    console.print(explain(layout, model, None, dtype=jnp.bfloat16, requests=576, context=8192, rows=17))
    text = console.export_text()
    for phrase in (
        "nvl72: dp 1 × ep 72 × tp 1, 72 of 72 GPUs",
        "5 or 6 of 384 experts a rank: 432 slots, 0 replicas, 48 empty; exchange auto",
        "latent cache, 8 × 8,192 tokens",
        "136 rows a device, exchange alltoall",
    ):
        assert phrase in text, text
    assert any("routed experts" in line and "ep: 72 ways" in line and "8,918.14" in line for line in text.splitlines())
    # 8 requests × 8192 tokens × 61 layers × 576 values × 2 bytes.
    assert f"{8 * 8192 * 61 * 576 * 2 / 1e6:,.2f}" in text


def test_links_of_a_machine_with_a_network(k26):
    console = Console(record=True, width=160, file=io.StringIO())
    model = model_for(k26, HGX.layout)
    console.print(explain(HGX, model, None, dtype=jnp.bfloat16, requests=1, context=1024, rows=17))
    lines = console.export_text().splitlines()
    assert any("rows to experts" in line and "all-gather" in line and "network, 2 domains" in line for line in lines)
    assert any("after attention" in line and "all-reduce" in line and "NVLink" in line for line in lines)


@pytest.mark.parametrize(
    ("exchange", "message"),
    [("carrier pigeon", "exchange is 'carrier pigeon': choose from auto, allgather"), ("tensor", "split by 'width'")],
)
def test_exchanges_that_do_not_fit_are_refused(exchange, message):
    with pytest.raises(LayoutError, match=message):
        model_for(ModelConfig.from_json(TINY), dataclasses.replace(HGX.layout, exchange=exchange))
