import dataclasses
import itertools

import pytest

from kimi_jax.estimator.scenario import Prefill, make_scenario
from kimi_jax.estimator.step import TIMED, estimate
from meshes import Layout, LayoutError, gpu, preset

MACHINES = (("hgx-ib-8", "b300"), ("hgx-ib-16", "h200"), ("nvl36", "gb200"), ("nvl72", "gb300"))
WIDTH = Layout(tp=8, experts="width")
SPLIT, SPLIT_RACK = Layout(tp=8, cache="split"), Layout(ep=9, tp=8, cache="split")


def scenario(mesh="hgx-ib-8", card="b300", layout=None, **options):
    machine = preset(mesh)
    options = {"concurrency": 1, "context": 8192} | options
    return make_scenario(machine.with_layout(layout) if layout else machine, gpu(card), **options)


def scenarios():
    """Layouts of every kind under light and heavy loads, with and without a tree."""
    layouts = {
        8: (Layout(tp=8), Layout(tp=8, experts="width"), Layout(ep=8), Layout(ep=2, tp=4, experts="width")),
        16: (Layout(dp=2, tp=8), Layout(ep=2, tp=8), Layout(ep=16, exchange="alltoall"), Layout(tp=16)),
        36: (Layout(ep=9, tp=4), Layout(ep=36, exchange="alltoall")),
        72: (Layout(ep=9, tp=8), Layout(ep=72, exchange="alltoall"), Layout(tp=64), Layout(dp=9, tp=8)),
    }
    for mesh, card in MACHINES:
        for layout in layouts[preset(mesh).topology.num_gpus]:
            for load, budget, overlap in itertools.product((1, 300), (0, 16), (0.0, 1.0)):
                yield scenario(mesh, card, layout, concurrency=load, budget=budget, overlap=overlap)


def test_no_estimate_beats_the_limit():
    for kernels in ("public", "target"):
        for s in scenarios():
            s = dataclasses.replace(s, kernels=make_scenario(
                s.preset, s.gpu, concurrency=1, context=1, kernel_library=kernels).kernels)  # fmt: skip
            e = estimate(s)
            assert tuple(e.parts) == TIMED
            assert e.step_ms >= e.limit_ms
            for name, part in e.parts.items():
                assert part.ms >= part.limit_ms(s.gpu) * (1 - 1e-9), (name, s.preset.layout)


def test_parts_add_up():
    for s in scenarios():
        e = estimate(s)
        assert e.step_ms + e.hidden_ms == pytest.approx(sum(part.ms for part in e.parts.values()))
        for part in e.parts.values():
            total = part.fixed_us + part.memory_us + part.compute_us + part.link_us
            assert part.total_us == pytest.approx(total)


@pytest.mark.parametrize("what", ["hbm_bytes_per_s", "bf16_flops_per_s", "local_link", "network_link"])
def test_more_bandwidth_never_slows_anything(what):
    for s in scenarios():
        value = getattr(s.gpu, what)
        faster = value * 1.5 if isinstance(value, float) else dataclasses.replace(
            value, bytes_per_s=value.bytes_per_s * 1.5)  # fmt: skip
        after = estimate(dataclasses.replace(s, gpu=dataclasses.replace(s.gpu, **{what: faster})))
        assert after.step_ms <= estimate(s).step_ms + 1e-12


def test_more_load_or_context_never_quickens_a_step():
    for s in scenarios():
        base = estimate(s).step_ms
        assert estimate(dataclasses.replace(s, context=2 * s.context)).step_ms >= base
        assert estimate(dataclasses.replace(s, concurrency=2 * s.concurrency)).step_ms >= base - 1e-9


def test_bytes_of_one_row_on_one_node_by_hand():
    # tp 8, experts by width, one row: 1/8 of 8 experts and of everything that tp splits.
    e = estimate(scenario(layout=Layout(tp=8, experts="width"), context=1))
    parts = e.parts
    zipf_experts = parts["experts"].hbm_bytes * 8 / 24_772_608
    assert zipf_experts == pytest.approx(8, rel=1e-3)
    assert parts["shared_expert"].hbm_bytes == 3 * 7168 * 2048 * 2 / 8
    assert parts["head"].hbm_bytes == 163840 * 7168 * 2 / 8 + 7168 * 2  # with the last norm
    assert parts["dense"].hbm_bytes == 3 * 7168 * 18432 * 2 / 8
    # 122 all-reduces in the layers and one of the embedding; one row of 7168 bfloat16 values.
    assert parts["reductions"].count == 123
    assert parts["reductions"].local_bytes == pytest.approx(7168 * 2 * 7 / 8)
    assert parts["exchange"].ms == 0


def test_cache_is_read_once_a_request_and_repeated_over_tp():
    def attention(**options):
        return estimate(scenario(context=100_000, concurrency=4, **options)).parts["attention"]

    cache = 4 * 100_000 * 576 * 2
    plain, tree = attention(), attention(budget=8)
    elementwise = 114_688 * 4
    # Eight more rows a request read no more cache, only more activations.
    assert tree.hbm_bytes - plain.hbm_bytes == pytest.approx(8 * elementwise)
    projections = (7168 * 2112 + 1536 + 512 + 2 * 7168 + 64 * (1536 * 192 + 512 * 256 + 128 * 7168) / 8) * 2
    assert plain.hbm_bytes == pytest.approx(projections + cache + elementwise)
    split = attention(layout=SPLIT)
    assert plain.hbm_bytes - split.hbm_bytes == pytest.approx(cache * 7 / 8)
    merged = estimate(scenario(context=100_000, concurrency=4, layout=SPLIT)).parts["reductions"]
    assert merged.ms > estimate(scenario(context=100_000, concurrency=4)).parts["reductions"].ms


def test_messages_by_hand():
    """Two rows a request on 9 groups of 8, one request each; 60 layers with experts, 61 in all, 6 in the drafter."""
    parts = estimate(scenario("nvl72", "gb300", concurrency=9, budget=1)).parts
    counts = {name: round(part.count * part.messages) for name, part in parts.items() if part.messages}
    assert counts == {"head": 1, "drafter": 14, "tree": 1, "exchange": 120, "reductions": 123}
    row, words = 7168 * 2, 8 * 8
    sent = {name: part.count * part.local_bytes for name, part in parts.items()}
    assert sent["exchange"] == pytest.approx(60 * 9 * 2 * (2 * row + words) * 8 / 9)
    assert sent["head"] == pytest.approx(2 * 8 * 8 * 7 / 8)  # a word and its logit of each rank for each row
    assert sent["tree"] == pytest.approx(1 * 8 * (8 + 4) * 7 / 8)  # one candidate and a log-sum-exp
    assert sent["drafter"] == pytest.approx(13 * 8 * row * 7 / 8 + 2 * row * 7 / 8)
    split = estimate(scenario("nvl72", "gb300", SPLIT_RACK, concurrency=9, budget=1)).parts["reductions"]
    assert split.count * split.messages == pytest.approx(4 * 61 + 1)
    heads = 2 * 64 * (2 * 576 + 2 * 512 + 4) * 7 / 8
    assert split.count * split.local_bytes == pytest.approx(123 * 2 * row * 7 / 8 + 61 * heads)


def test_memory_by_hand():
    e = estimate(scenario(layout=Layout(tp=8, experts="width"), concurrency=16, budget=8))
    assert e.memory.weights["experts"] == pytest.approx(570.761e9 / 8, rel=1e-4)
    assert e.memory.cache == pytest.approx(16 * 8192 * 70_272)
    assert e.memory.drafter == pytest.approx(6.9575e9 / 8 + 16 * 4096 * 24_576 / 8, rel=1e-3)
    assert e.memory.fits
    rack = estimate(scenario("nvl72", "gb300"))
    assert rack.memory.weights["experts"] == pytest.approx(60 * 6 * 24_772_608)
    full = estimate(scenario(concurrency=e.memory.max_requests, budget=8, layout=Layout(tp=8, experts="width")))
    over = estimate(scenario(concurrency=e.memory.max_requests + 1, budget=8, layout=Layout(tp=8, experts="width")))
    assert full.memory.fits
    assert not over.memory.fits


def test_drafting_costs_a_drafter_and_yields_more_tokens():
    plain, tree = estimate(scenario()), estimate(scenario(budget=8))
    assert plain.parts["drafter"].ms == plain.parts["tree"].ms == 0
    assert plain.acceptance_length == 1
    drafter = 6.9575e9 + 163840 * 7168 * 2 + 4096 * 24_576  # its weights, the head, keys and values of its window
    assert tree.parts["drafter"].hbm_bytes == pytest.approx(drafter / 8, rel=1e-3)
    assert tree.acceptance_length == pytest.approx(tree.scenario.acceptance.length(8))
    assert tree.tokens_per_s_per_user == pytest.approx(tree.acceptance_length / tree.step_ms * 1e3)


def test_overlap_hides_the_shorter_of_communication_and_computation():
    serial, hidden = (estimate(scenario("hgx-ib-16", "h200", overlap=w, concurrency=64)) for w in (0.0, 1.0))
    communication = serial.parts["exchange"].ms + serial.parts["reductions"].ms
    computation = serial.step_ms - communication
    assert hidden.step_ms == pytest.approx(max(communication, computation))


def test_a_chunk_reads_the_weights_once_with_the_round():
    """Beside 4 trees of 8 rows a chunk of 512 tokens costs less than alone, by about what both would read."""
    decode = estimate(scenario(concurrency=4, budget=7, layout=WIDTH))
    alone = estimate(scenario(layout=WIDTH, concurrency=0, chunk=512, chunk_context=4096))
    mixed = estimate(scenario(concurrency=4, budget=7, chunk=512, chunk_context=4096, layout=WIDTH))
    assert max(decode.step_ms, alone.step_ms) < mixed.step_ms < 0.75 * (decode.step_ms + alone.step_ms)
    # 512 rows read (nearly) all 384 experts of 24.77 MB in 60 layers over 8 GPUs.
    experts = mixed.parts["experts"]
    assert experts.count * experts.hbm_bytes == pytest.approx(60 * 384 * 24_772_608 / 8, rel=0.01)
    assert experts.count * experts.flops == pytest.approx(60 * (512 + 32) * 8 * 6 * 7168 * 2048 / 8)
    # Two all-reduces a layer and the embedding's, of 544 rows.
    assert mixed.parts["reductions"].local_bytes == pytest.approx(544 * 7168 * 2 * 7 / 8)


def test_attention_to_a_prompt_grows_with_what_it_sees():
    """8 heads' scores (192 wide) and values (128) of 2,048 rows on 4,096 more tokens in 61 layers, at half of peak."""
    short, long = (estimate(scenario(concurrency=0, chunk=2048, chunk_context=n)) for n in (4096, 8192))
    added = 2 * 8 * (192 + 128) * 2048 * 4096 * 61 / (0.5 * 2250e12) * 1e3
    assert long.step_ms - short.step_ms == pytest.approx(added, rel=1e-6)


def test_prompts_take_their_share():
    """8 requests that need 8 · 8192 / 1024 = 64 prompt tokens a step take 1/32 of what a chunk of 2,048 adds."""
    plain = estimate(scenario(concurrency=8))
    mixed = estimate(scenario(concurrency=8, chunk=2048, chunk_context=4096))
    e = estimate(scenario(concurrency=8, prefill=Prefill(8192, 1024, 2048)))
    assert e.prefill_ms == pytest.approx((mixed.step_ms - plain.step_ms) / 32)
    assert e.tokens_per_s_per_user == pytest.approx(1e3 / (plain.step_ms + e.prefill_ms))


@pytest.mark.parametrize(
    ("mesh", "axes", "message"),
    [
        ("nvl72", {"ep": 1, "tp": 72}, "tp sizes that work are 1, 2, 4, 8, 16, 32, 64"),
        ("nvl36", {"ep": 1, "tp": 36}, "does not divide attention heads 64"),
        ("hgx-ib-24", {"ep": 1, "tp": 24}, "does not divide attention heads 64"),
    ],
)
def test_impossible_tp_is_refused_with_what_works(mesh, axes, message):
    machine = preset(mesh).with_axes(**axes)
    with pytest.raises(LayoutError, match=message):
        make_scenario(machine, gpu(machine.gpu_names[0]), concurrency=1, context=1)


def test_experts_over_72_need_replicas():
    with pytest.raises(LayoutError, match=r"384 expert slots do not lie evenly on 72 ranks.*use 432, 504"):
        scenario("nvl72", "gb300", physical_slots=384)
    assert estimate(scenario("nvl72", "gb300", physical_slots=504)).memory.weights["experts"] == pytest.approx(
        60 * 7 * 24_772_608
    )
    with pytest.raises(LayoutError, match=r"use 384, 400.*without replicas"):
        scenario("hgx-ib-16", "b300", physical_slots=390)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0: at least 1"),
        ({"budget": -1}, "budget is -1"),
        ({"overlap": 1.5}, "overlap is 1.5"),
        ({"kernel_library": "cutlass"}, "no kernels 'cutlass' .* choose from program, public, target, vllm"),
        ({"card": "gb300"}, "hgx-ib-8 is made of b300, b200, h200, h100, not of gb300"),
    ],
)
def test_loads_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        scenario(**options)


def test_eplb_evens_out_the_load():
    even, skewed = (
        estimate(scenario("nvl72", "gb300", Layout(ep=72, exchange="alltoall"), concurrency=8192, has_eplb=on))
        for on in (True, False)
    )
    assert skewed.parts["experts"].ms > 1.3 * even.parts["experts"].ms
    assert skewed.parts["exchange"].ms > even.parts["exchange"].ms


def test_links_that_a_layout_uses():
    nodes = estimate(scenario("hgx-ib-16", "b300", concurrency=64)).parts
    assert nodes["exchange"].network_bytes > 0
    assert nodes["reductions"].network_bytes == 0
    rack = estimate(scenario("nvl72", "gb300", concurrency=64)).parts
    assert rack["exchange"].network_bytes == 0
    wide = estimate(scenario("hgx-ib-16", "b300", Layout(tp=16))).parts["reductions"]
    assert (wide.note, wide.fixed_us) == ("NCCL, network", 62)  # as measured, where no better one is assumed
    fast = estimate(scenario("hgx-ib-16", "b300", Layout(tp=16), hierarchical=True)).parts["reductions"]
    assert fast.note.startswith("hierarchical")
    assert fast.total_us < 20
    assert wide.network_bytes == pytest.approx(7168 * 2 / 8 / 2)


@pytest.mark.parametrize(("card", "mesh", "us"), [("b300", "hgx-ib-16", 15), ("gb300", "nvl72", 40)])
def test_this_program_launches_collectives_and_sends_its_own_buffers(card, mesh, us):
    layout = Layout(ep=16 if mesh == "hgx-ib-16" else 72, exchange="alltoall")
    public, program = (
        estimate(scenario(mesh, card, layout, concurrency=512, budget=7, kernel_library=name))
        for name in ("public", "program")
    )
    # Two messages of the exchange in each of 60 layers, at tp 1 the only ones.
    launched = program.parts["launch"].ms - public.parts["launch"].ms
    assert launched == pytest.approx((120 * us + 50 - 400) / 1e3)
    sent = (each.parts["exchange"].local_bytes + each.parts["exchange"].network_bytes for each in (program, public))
    assert 2 < next(sent) / next(sent) < 12  # buffers for the expected load and more, beside what is due
    assert program.parts["exchange"].link_us > 1.2 * public.parts["exchange"].link_us
    for part in ("attention", "experts", "head"):
        assert program.parts[part] == public.parts[part]
