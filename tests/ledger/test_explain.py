"""What `explain` says of bytes and messages, against published sizes and against the compiled programs."""

import dataclasses
import functools
import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from kimi_jax.commands import decode
from kimi_jax.config import ModelConfig
from kimi_jax.decoding.engine import Draft
from kimi_jax.decoding.loading import model_for
from kimi_jax.decoding.state import Dispatch
from kimi_jax.estimator.scenario import make_scenario
from kimi_jax.ledger.explain import explain
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.ledger.step import Step, ledger
from kimi_jax.model.pages import empty_cache
from kimi_jax.model.rows import causal_rows
from kimi_jax.parallel.messages import Message
from kimi_jax.parallel.placement import even_placement
from kimi_jax.parallel.sharding import REQUESTS, cache_axis, cache_spec, rules
from kimi_jax.parameters import abstract, bind, specs
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.messages import collectives
from meshes.devices import build_mesh
from meshes.hardware import gpu
from meshes.presets import LayoutError, Preset, preset

ROOT = Path(__file__).parents[2]
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
        with_exchange(HGX.with_axes(dp=2, ep=1, tp=8), "allgather", "width"),
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
        [("all-gather", ("tp",), 2, 7680), ("all-reduce", ("tp",), 5, 3072), ("all-to-all", ("tp",), 2, 6336)],
    ),
    # A device sends one row of its six, padded to eight: 544 bytes with its choices, 512 of its sum.
    "hgx-ib-16 hierarchical": (
        with_exchange(HGX, "hierarchical"),
        [
            ("all-gather", ("ep",), 1, 2 * 544),
            ("all-gather", ("tp",), 1, 16 * 544),
            ("all-reduce", ("tp",), 5, 3072),
            ("reduce-scatter", ("ep",), 1, 2 * 512),
            ("reduce-scatter", ("tp",), 1, 16 * 512),
        ],
    ),
    "hgx-ib-16 alltoall": (
        with_exchange(HGX, "alltoall"),
        [("all-reduce", ("tp",), 5, 3072), ("all-to-all", ("ep",), 1, 2 * 3072), ("all-to-all", ("ep",), 1, 2 * 3288)],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_table_of_collectives(name):
    """An extra collective in the compiled forward fails, and so does one that the ledger does not tell of."""
    machine, golden = GOLDEN[name]
    config = dataclasses.replace(ModelConfig.from_json(TINY), num_hidden_layers=2)
    layout = machine.layout
    model = model_for(config, layout)
    told = [(m.kind, m.axes, m.count, m.bytes) for m in of_a_forward(config, machine, ROWS)]
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
    told = of_a_forward(config, machine, rows)
    module = Module(compiled_forward(machine, model, rows))
    found = sorted((c.kind, c.axes, c.count, c.bytes) for c in collectives(module, layout.axis_sizes))
    assert found == sorted((m.kind, m.axes, m.count, m.bytes) for m in told)
    assert {kind for kind, *_ in found} == {"all-to-all"}
    held = {i.opcode for computation in module.computations.values() for i in computation.values()}
    assert {"all-to-all", "all-gather", "reduce-scatter"} <= held


def of_a_forward(config: ModelConfig, machine: Preset, rows: int) -> list[Message]:
    """The messages of the layers alone, with one request of so many rows on each device."""
    layout = machine.layout
    needs = ledger(Step(config, layout, layout.groups, rows, context=8, dtype=jnp.float32))
    return [*needs["reductions"].messages, *needs["exchange"].messages]


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
    pages = jax.ShapeDtypeStruct((requests, 1), jnp.int32)
    batch = jax.eval_shape(causal_rows, tokens, counts, counts, pages)
    axis = cache_axis(places)
    ranks = 1 if axis is None else machine.layout.tp
    cache = jax.eval_shape(functools.partial(empty_cache, model.config, requests, jnp.float32, axis, ranks))
    return run.lower(abstract(model, jnp.float32, mesh, places), batch, cache).compile().as_text()


@pytest.mark.parametrize("name", ["hgx-ib-16 split cache", "hgx-ib-16", "nvl36", "nvl72"])
@pytest.mark.slow
def test_a_round_sends_what_is_told(name, engines):
    """Layers, head and drafter together are all messages of a compiled round that drafts and verifies a tree."""
    engine, budget, requests = engines(name), 7, 1
    programs = engine.programs(Draft("ddtree", budget))
    layout = engine.layout
    slots = programs.groups
    state = jax.eval_shape(lambda: programs.start(slots=slots, pages=slots, capacity=programs.page_tokens))
    now = Dispatch(jax.ShapeDtypeStruct((slots, 1), jnp.int32), jax.ShapeDtypeStruct((slots,), bool))
    parameters = {name: engine.parameters[name] for name in programs.needs}
    text = programs.round.lower(parameters, state, now).compile().as_text()
    assert engine.drafter is not None
    step = Step(
        engine.config, layout, requests * layout.groups, budget + 1, 8, engine.drafter.config, dtype=jnp.float32
    )
    told = [message for need in ledger(step).values() for message in need.messages]
    expected: dict[tuple, int] = {}
    for m in told:
        expected[m.kind, m.axes, m.bytes] = expected.get((m.kind, m.axes, m.bytes), 0) + m.count
    found = merged(collectives(Module(text), layout.axis_sizes))
    assert {(c.kind, c.axes, c.bytes): c.count for c in found} == expected


def explained(machine: Preset, **load) -> str:
    console = Console(record=True, width=160, file=io.StringIO())
    placement = even_placement(k26().n_routed_experts, machine.layout.expert_ranks)
    console.print(*explain(machine, Step(k26(), machine.layout, **load), placement), sep="\n")
    return console.export_text()


def cells(text: str) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


def test_the_explanation_names_every_part():
    machine = with_exchange(preset("nvl72").with_axes(dp=1, ep=72, tp=1), "auto")
    text = explained(machine, requests=576, context=8192, rows=17)
    for phrase in (
        "nvl72: dp 1 × ep 72 × tp 1, 72 of 72 GPUs",
        "5 or 6 of 384 experts a rank: 432 slots, 0 replicas, 48 empty; exchange auto",
        "latent cache, 8 × 8,192 tokens",
        "136 rows a device, exchange alltoall",
    ):
        assert phrase in text, text
    assert ["experts", "ep: 72 ways", "8,918.14"] in cells(text)
    # 8 requests × 8192 tokens × 61 layers × 576 values × 2 bytes.
    assert f"{8 * 8192 * 61 * 576 * 2 / 1e6:,.2f}" in text


def test_what_is_explained_is_the_ledger():
    """Every held part and every message stands in the tables, the drafter's and the loop's too."""
    machine = preset("hgx-ib-16")
    load = {"requests": 4, "context": 1024, "rows": 8, "drafter": kimi_drafter(), "program": "decode"}
    text = explained(machine, **load)
    for part, need in ledger(Step(k26(), machine.layout, **load)).items():
        assert not need.weights or part in {row[0] for row in cells(text)}
        for message in need.messages:
            rows = [row for row in cells(text) if row[:2] == [part, message.what]]
            assert [row[5] for row in rows] == [str(message.count)]


def test_json_of_explain_is_one_object_with_the_ledger(capsys):
    """The tables' figures as numbers, by the command."""
    decode.run(["--mesh", "hgx-ib-16", "--checkpoint", str(TINY), "--explain", "--json", "one", "two"])
    data = json.loads(capsys.readouterr().out)
    config, machine = ModelConfig.from_json(TINY), preset("hgx-ib-16")
    step = Step(config, machine.layout, requests=2, rows=1, context=8192, program="decode")
    counted = ledger(step)
    assert (data["mesh"], data["gpus"], data["requests"], data["context"]) == ("hgx-ib-16", 16, 2, 8192)
    for part, need in counted.items():
        assert sum(each["bytes"] for each in data["weights"] if each["part"] == part) == need.weights
        messages = [
            (m["what"], tuple(m["axes"]), m["count"], m["bytes"]) for m in data["messages"] if m["part"] == part
        ]
        assert messages == [(m.what, m.axes, m.count, m.bytes) for m in need.messages]
    assert data["caches"] == {"latent cache": counted["attention"].cache}
    assert data["total_bytes"] == sum(need.weights for need in counted.values()) + counted["attention"].cache


def test_links_of_a_machine_with_a_network():
    lines = explained(HGX, requests=1, context=1024, rows=17).splitlines()
    assert any("rows to experts" in line and "all-gather" in line and "network, 2 domains" in line for line in lines)
    assert any("after attention" in line and "all-reduce" in line and "NVLink" in line for line in lines)


@pytest.mark.parametrize("exchange", ["carrier pigeon", "tensor"])
def test_exchanges_that_do_not_exist_are_refused_everywhere(exchange):
    layout, message = dataclasses.replace(HGX.layout, exchange=exchange), f"exchange is '{exchange}': choose from auto"
    config = ModelConfig.from_json(TINY)
    with pytest.raises(LayoutError, match=message):
        model_for(config, layout)
    with pytest.raises(LayoutError, match=message):
        ledger(Step(config, layout, 2, 1, 1))
    with pytest.raises(LayoutError, match=message):
        make_scenario(HGX.with_layout(layout), gpu("h200"), concurrency=1, context=1)
