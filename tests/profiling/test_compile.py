"""Rounds compiled for GPUs that are not here: reduced widths on two layers always, K2.6 whole in the slow tests."""

import re

import pytest

from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.messages import collectives
from kimi_jax.profiling.report import make_report
from kimi_jax.profiling.traffic import host_transfers, materialised


@pytest.fixture(scope="module", params=[("hgx-ib-16", "h200"), ("nvl72", "gb300")], ids=lambda p: p[1])
def compiled(request, compile_apart):
    return compile_apart(*request.param, "round", 6, 2, "reduced")


def test_messages_of_a_layer(compiled):
    """Golden: two reductions a layer, and one message each way for each layer with experts. The compiler adds none."""
    case = compiled.case
    rows, hidden, ep = case.device_requests * case.rows, case.config.hidden_size, case.preset.layout.ep
    words = hidden // 2 + 2 * case.config.num_experts_per_tok  # bfloat16 pairs, slots and weights
    found = collectives(Module(compiled.text), case.preset.layout.axis_sizes)
    of_layers = [(c.part, c.kind, c.axes, c.bytes, c.count) for c in found if c.part in ("exchange", "reductions")]
    assert of_layers == [
        ("exchange", "all-gather", ("ep",), ep * rows * words * 4, 1),
        ("exchange", "reduce-scatter", ("ep",), ep * rows * hidden * 2, 1),
        ("reductions", "all-reduce", ("tp",), rows * hidden * 2, 4),
    ]
    silent = {"attention", "router", "experts", "shared_expert", "dense", "head"}
    assert not silent & {c.part for c in found}


KNOWN_COPIES = re.compile(
    r"self_attn\.kv_b_proj\.weight$"
    r"|shared_experts\.(gate|up)_proj\.weight$"
    r"|^drafter\.layers\.\d+\.self_attn\.[kv]_proj\.weight$"
)
"""Dense weights that XLA writes again: it cuts kv_b_proj into its key and value halves before the two products, and its
dot merger joins products of one input, gate and up of a small shared expert and the drafter's keys and values."""


def test_packed_weights_and_cache_are_read_in_place(compiled):
    module = Module(compiled.text)
    known = {array.name for array in compiled.weights} | {f"state.{array.name}" for array in compiled.state}
    assert set(module.arguments.values()) <= known
    copied = {found.array for found in materialised(module, smallest=1 << 14)}
    assert not {name for name in copied if not KNOWN_COPIES.search(name)}
    assert host_transfers(module) == []


def test_kernels_serve_both_presets(compiled):
    report = make_report(compiled)
    kernels = {part.part: sum(kernel.count for kernel in part.kernels) for part in report.parts}
    assert kernels["experts"] == 2  # gate with up, and down, of the one layer with experts
    assert kernels["attention"] >= 2  # one a layer, and one that joins pieces of a long context
    assert report.read_ratio == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "gpu"), [("hgx-ib-16", "b300"), ("nvl72", "gb300")])
def test_all_layers(mesh, gpu, compile_apart):
    report = make_report(compile_apart(mesh, gpu, "round", 16, 61, "full"))
    held = sum(report.holdings.weights.values())
    assert report.holdings.free > 0
    assert report.holdings.temporaries <= 0.05 * held
    assert all(KNOWN_COPIES.search(found.array) for found in report.materialised)
    copied = sum(found.bytes for found in report.materialised)
    assert 2 * copied <= 0.1 * sum(part.need.hbm_bytes for part in report.parts)  # written, and read again
    assert report.host_transfers == ()
    assert report.read_ratio <= 1.1
