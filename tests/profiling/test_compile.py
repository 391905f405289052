"""Rounds compiled for GPUs that are not here: reduced widths on two layers always, K2.6 whole in the slow tests."""

import dataclasses
import html
import json
import re
import runpy
from pathlib import Path

import jax.numpy as jnp
import pytest

from kimi_jax.ledger.launches import experts_shape
from kimi_jax.parallel.exchange.choice import buffer_rows
from kimi_jax.profiling import check, tables
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.messages import collectives
from kimi_jax.profiling.report import make_report
from kimi_jax.profiling.traffic import host_transfers, launches, materialised
from meshes import gpu
from pallas_kernels import int4_moe
from pallas_kernels.assembler import Assembled, shared_memory, with_shared_memory
from pallas_kernels.int4_moe.tile import shared_memory_bytes
from pallas_kernels.operation import Device

GOLDEN = runpy.run_path(str(Path(__file__).with_name("golden.py")))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("hgx-ib-16", "h200"), id="h200", marks=pytest.mark.slow),
        pytest.param(("nvl72", "gb300"), id="gb300"),
    ],
)
def compiled(request, compile_apart):
    return compile_apart(*request.param, "round", 6, 2, "reduced")


def test_messages_of_a_layer(compiled):
    """Two reductions a layer and one of the embedding, and one message each way and level for each layer with experts.

    The compiler adds none. A round asks once whether buffers overflowed.
    """
    case, layout = compiled.case, compiled.case.preset.layout
    rows, hidden, ep, top_k = case.step.device_rows, case.config.hidden_size, layout.ep, case.config.num_experts_per_tok
    words = hidden // 2 + 2 * top_k  # bfloat16 pairs, slots and weights
    if case.exchange == "alltoall":
        room = ep * buffer_rows(rows, top_k, case.expert_slots, case.expert_slots // layout.expert_ranks, ep)
        exchanged = [
            ("exchange", "all-to-all", ("ep",), room * hidden * 2, 1),
            ("exchange", "all-to-all", ("ep",), room * (words + 1) * 4, 1),
        ]
    else:
        sent = ep * rows // layout.tp
        exchanged = [
            ("exchange", "all-gather", ("ep",), sent * words * 4, 1),
            ("exchange", "all-gather", ("tp",), ep * rows * words * 4, 1),
            ("exchange", "reduce-scatter", ("ep",), sent * hidden * 2, 1),
            ("exchange", "reduce-scatter", ("tp",), ep * rows * hidden * 2, 1),
        ]
    found = collectives(Module(compiled.text), layout.axis_sizes)
    of_layers = [(c.part, c.kind, c.axes, c.bytes, c.count) for c in found if c.part in ("exchange", "reductions")]
    assert of_layers == [*exchanged, ("reductions", "all-reduce", ("tp",), rows * hidden * 2, 5)]
    asked = [(c.kind, c.axes, c.bytes, c.count) for c in found if c.part == "other"]
    assert asked == ([("all-reduce", ("tp",), 4, 1)] if case.exchange == "alltoall" else [])
    drawn = [(c.kind, c.axes, c.bytes, c.count) for c in found if c.part == "head"]
    assert drawn == [("all-gather", ("tp",), rows * case.preset.layout.tp * 8, 1)]  # a word and its logit of each rank
    silent = {"attention", "router", "experts", "shared_expert", "dense"}
    assert not silent & {c.part for c in found}


KNOWN_COPIES = re.compile(r"shared_experts\.(gate|up)_proj\.weight$")
"""XLA's dot merger joins products of one input, and writes the weights of a small shared expert's gate and up side by
side for it; those of K2.6's size it reads where they are."""

READ_TWICE = re.compile(r"self_attn\.kv_b_proj\.|^drafter\..*\.[kv]_proj\.")
"""Before and after the absorbed attention; for the drafter's context and for its block."""


def test_packed_weights_and_cache_are_read_in_place(compiled):
    module = Module(compiled.text)
    known = {array.name for array in compiled.weights} | {f"state.{array.name}" for array in compiled.state}
    assert set(module.arguments.values()) <= known | {"now.pages", "now.active"}
    copied = {found.array for found in materialised(module, smallest=1 << 14)}
    assert not {name for name in copied if not KNOWN_COPIES.search(name)}
    assert host_transfers(module) == []
    assert sum(part.host_waits for part in launches(module).values()) == 0


def test_kernels_serve_both_presets(compiled):
    report = make_report(compiled)
    kernels = {part.part: sum(kernel.count for kernel in part.kernels) for part in report.parts}
    assert kernels["experts"] == 4  # gather, gate with up, down and combine of the one layer with experts
    assert kernels["attention"] >= 2  # one a layer, and one that joins pieces of a long context


def test_weights_are_read_once_but_for_those_of_two_products(compiled):
    parts = [part for part in make_report(compiled).parts if part.part != "experts"]
    head = next(part.weight_bytes_held for part in parts if part.part == "head")  # the drafter's too
    twice = sum(array.bytes for array in compiled.weights if READ_TWICE.search(array.name))
    held = sum(part.weight_bytes_held for part in parts)
    assert sum(part.weight_bytes_read for part in parts) == pytest.approx(held + head + twice, rel=2e-3)


@pytest.fixture(scope="module")
def report(compiled):
    return make_report(compiled)


def test_shared_memory_is_what_the_kernels_were_planned_with(compiled):
    case, card = compiled.case, gpu(compiled.case.gpu)
    shape = experts_shape(case.config, case.preset.layout, case.expert_slots, case.step.device_rows)
    device = Device(card.device_kind, "{}.{}".format(*card.compute_capability), card.core_count)
    plan = int4_moe.OPERATION.choose(shape, jnp.bfloat16, device).config
    found = shared_memory(compiled.text)
    barriers = 4096  # Mosaic puts barriers and alignment behind the buffers
    for name, buffers in (
        ("int4_gate_up_mosaic_gpu", shared_memory_bytes(plan.gate_up, "gate_up")),
        ("int4_down_mosaic_gpu", shared_memory_bytes(plan.down, "down")),
    ):
        assert buffers <= found[name] <= buffers + barriers
    assembled = Assembled("int4_down_mosaic_gpu_kernel", 128, 0, 0, 0)
    assert with_shared_memory((assembled,), compiled.text)[0].shared_bytes == found["int4_down_mosaic_gpu"]


def test_golden_figures(compiled):
    """After a change that is meant: `uv run tests/profiling/golden.py`."""
    assert GOLDEN["golden"](compiled) == json.loads(GOLDEN["path"](compiled).read_text())


def test_ledger_and_compiler_agree(report):
    pairs = check.compare(report)
    compared = {pair.part for pair in pairs}
    assert {"attention", "router", "experts", "shared_expert", "dense", "head", "drafter", "exchange"} <= compared
    assert check.apart(pairs) == ()


def test_what_is_apart_is_named(report):
    """A message too many and a weight read twice."""

    def spoilt(part):
        if part.part == "exchange":
            return dataclasses.replace(part, messages=part.messages + 1)
        return dataclasses.replace(part, weight_bytes_read=2 * part.weight_bytes_read) if part.part == "dense" else part

    parts = tuple(map(spoilt, report.parts))
    wrong = check.apart(check.compare(dataclasses.replace(report, parts=parts)))
    assert [(pair.part, pair.what) for pair in wrong] == [("dense", "weights and cache read"), ("exchange", "messages")]


def test_only_rounds_are_checked(report):
    prefill = dataclasses.replace(report.case, program="prefill")
    with pytest.raises(ValueError, match="compile the program 'round'"):
        check.compare(dataclasses.replace(report, case=prefill))


def test_everything_necessary_is_moved(report):
    for part in report.parts:
        assert part.moved_bytes >= 0.98 * part.need.hbm_bytes, part.part
    assert report.moved_ratio >= 1


def test_page_draws_every_part(report, tmp_path):
    tables.write_page(report, tmp_path / "page.html")
    page = html.unescape(re.sub(r"<[^>]*>", "", (tmp_path / "page.html").read_text()))
    drawn = page.split("bytes of one execution")[1]
    for part in report.parts:
        if part.need.hbm_bytes:
            assert re.search(rf"^{part.part} +must +[\d,.e+]+  █* *$", drawn, re.MULTILINE), part.part
    assert "█" * 40 in drawn
    assert f"{report.moved_ratio:.2f} × what it must" in page
    assert "Nothing here was measured." in page


def test_what_does_not_fit_says_by_how_much(report):
    assert report.verdict.startswith("Fits with")
    held = report.holdings
    weights = sum(held.weights.values())
    more = int(held.temporaries + held.free + 2e9)
    tight = dataclasses.replace(report, holdings=dataclasses.replace(held, temporaries=more))
    assert tight.verdict.startswith("Does not fit: 2.0 GB too much; at most")
    hopeless = dataclasses.replace(report, holdings=dataclasses.replace(held, card=weights + held.reserve - 1e9))
    assert "the weights with the reserve alone are 1.0 GB over the card" in hopeless.verdict


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "gpu"), [("hgx-ib-16", "b300"), ("nvl72", "gb300")])
def test_all_layers(mesh, gpu, compile_apart):
    report = make_report(compile_apart(mesh, gpu, "round", 16, 61, "full"))
    held = sum(report.holdings.weights.values())
    assert report.holdings.free > 0
    assert report.holdings.temporaries <= 0.05 * held
    assert report.materialised == ()
    assert report.host_transfers == ()
    assert report.read_ratio <= 1.1
