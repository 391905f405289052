import dataclasses
import re

import pytest

from kimi_jax.ledger.layout_rules import check, dimensions
from kimi_jax.ledger.models import k26
from meshes import AXES, PRESETS, Layout, LayoutError, expert_slots, preset


@pytest.mark.parametrize(
    ("name", "axes", "gpus", "slots"),
    [
        ("local", (1, 1, 1), 1, 384),
        ("hgx-ib-8", (1, 1, 8), 8, 384),
        ("hgx-ib-16", (1, 2, 8), 16, 384),
        ("hgx-ib-24", (1, 3, 8), 24, 384),
        ("hgx-ib-40", (1, 5, 8), 40, 400),
        ("hgx-ib-56", (1, 7, 8), 56, 392),
        ("hgx-ib-72", (1, 9, 8), 72, 432),
        ("nvl36", (1, 9, 4), 36, 396),
        ("nvl72", (1, 9, 8), 72, 432),
    ],
)
def test_default_layouts(name, axes, gpus, slots):
    layout = preset(name).layout
    assert tuple(layout.axis_sizes) == AXES == ("dp", "ep", "tp")
    assert tuple(layout.axis_sizes.values()) == axes
    assert layout.num_devices == gpus
    assert expert_slots(384, layout.expert_ranks) == slots
    check(k26(), layout)


def test_hgx_ib_alone_is_sixteen():
    assert preset("hgx-ib") is preset("hgx-ib-16")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hgx-ib-36", "4.5 nodes of 8.*hgx-ib-32 or hgx-ib-40"),
        ("hgx-ib-4", "0.5 nodes of 8.*use hgx-ib-8$"),
        ("hgx-ib-2048", "presets end at 144 nodes"),
        ("hgx-ib-84", "use hgx-ib-80 or hgx-ib-88"),
        ("nvl72x17", "presets end at 16 racks, nvl72x16"),
        ("nvl72x1", "unknown mesh 'nvl72x1'"),
        ("nvl144", "unknown mesh 'nvl144'.*nvl72"),
        ("hgx-ib-0", "unknown mesh"),
    ],
)
def test_machines_that_do_not_exist_are_refused(name, message):
    with pytest.raises(LayoutError, match=message):
        preset(name)


@pytest.mark.parametrize(
    ("name", "given", "axes"),
    [
        ("nvl72", {}, (1, 9, 8)),
        ("nvl72", {"ep": 6}, (1, 6, 8)),
        ("nvl72", {"tp": 4}, (1, 9, 4)),
        ("nvl72", {"ep": 4}, (1, 4, 8)),
        ("nvl72", {"ep": 72, "tp": 1}, (1, 72, 1)),
        ("nvl72", {"dp": 9, "ep": 1}, (9, 1, 8)),
        ("nvl72", {"dp": 2, "tp": 4}, (2, 9, 4)),
        ("nvl72", {"ep": 1, "tp": 64}, (1, 1, 64)),
        ("nvl72", {"dp": 1, "ep": 4, "tp": 16}, (1, 4, 16)),
        ("hgx-ib-8", {"tp": 4}, (1, 1, 4)),
        ("hgx-ib-16", {"dp": 2, "ep": 1}, (2, 1, 8)),
        ("local", {"tp": 4}, (1, 1, 4)),
        ("local", {"ep": 2, "tp": 2}, (1, 2, 2)),
    ],
)
def test_axes_left_open_keep_the_presets(name, given, axes):
    layout = preset(name).with_axes(**given).layout
    assert tuple(layout.axis_sizes.values()) == axes


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "nvl72",
            {"tp": 16},
            "^tp 16 beside the preset's dp 1 × ep 9 needs 144 GPUs and nvl72 has 72: state the other axes too, as in "
            "dp 1 × ep 4 × tp 16",
        ),
        ("hgx-ib-8", {"ep": 5}, r"ep 5 beside .* as in dp 1 × ep 5 × tp 1 \(5 of 8 GPUs\)$"),
        ("nvl72", {"dp": 2}, r"as in dp 2 × ep 9 × tp 4 \(72 of 72 GPUs\) or dp 2 × ep 4 × tp 8 \(64 of 72 GPUs\)$"),
        ("nvl72", {"dp": 2, "ep": 9, "tp": 8}, "needs 144 GPUs and nvl72 has 72"),
        ("nvl72", {"dp": 2, "ep": 72}, "dp 2 × ep 72 needs 144 GPUs and nvl72 has 72: dp at most 1, ep at most 36$"),
        ("local", {"tp": 16}, "needs 16 GPUs and local has 8"),
        ("nvl72", {"tp": 0}, "tp is 0"),
    ],
)
def test_axes_that_do_not_fit_are_refused(name, given, message):
    with pytest.raises(LayoutError, match=message):
        preset(name).with_axes(**given)


def test_overriding_axes_keeps_the_rest_of_the_layout():
    wide = preset("nvl72").with_layout(Layout(ep=9, tp=8, experts="width", exchange="alltoall"))
    layout = wide.with_axes(dp=9, ep=1).layout
    assert (layout.experts, layout.exchange, layout.dp) == ("width", "alltoall", 9)


@pytest.mark.parametrize("tp", [3, 36, 72, 128])
def test_tp_that_cuts_a_weight_unevenly_is_refused_with_the_sizes_that_work(tp):
    with pytest.raises(LayoutError, match=re.escape("tp sizes that work are 1, 2, 4, 8, 16, 32, 64")) as error:
        check(k26(), Layout(tp=tp))
    assert "attention heads 64" in str(error.value)


@pytest.mark.parametrize(
    ("layout", "near"),
    [
        (Layout(ep=6, tp=12), "dp 1 × ep 9 × tp 8, dp 1 × ep 4 × tp 16 (64 of 72 devices)"),
        (Layout(tp=72), "dp 1 × ep 1 × tp 64 (64 of 72 devices)"),
        (Layout(dp=2, ep=3, tp=6), "dp 2 × ep 4 × tp 4 (32 of 36 devices), dp 2 × ep 2 × tp 8 (32 of 36 devices)"),
    ],
)
def test_the_nearest_layouts_are_named(layout, near):
    with pytest.raises(LayoutError, match=re.escape(f"nearest layouts: {near}") + "$"):
        check(k26(), layout)
    for dp, ep, tp in re.findall(r"dp (\d+) × ep (\d+) × tp (\d+)", near):
        check(k26(), Layout(int(dp), int(ep), int(tp)))


@pytest.mark.parametrize(("field", "choices"), [("experts", "'slots' or 'width'"), ("cache", "'copied' or 'split'")])
def test_unknown_choices_are_refused(field, choices):
    with pytest.raises(LayoutError, match=f"{field} is 'half': choose {choices}"):
        Layout(**{field: "half"})


def test_dimensions_that_are_padded_never_refuse_a_layout():
    layout = Layout(ep=9, tp=8)
    experts = dimensions(k26(), layout)[-1]
    assert (experts.ranks(layout), experts.each(layout), experts.fits(layout)) == (72, 6, True)
    assert expert_slots(384, 72) == 72 * 6


def test_expert_width_is_only_cut_between_groups():
    narrow = dataclasses.replace(k26(), moe_intermediate_size=64)
    check(narrow, Layout(tp=4, experts="slots"))
    with pytest.raises(LayoutError, match=r"expert width in groups of 32 2: tp sizes that work are 1, 2;"):
        check(narrow, Layout(tp=4, experts="width"))


def test_expert_ranks_follow_the_choice_of_slots_or_width():
    assert Layout(dp=2, ep=9, tp=4).expert_ranks == 36
    assert Layout(dp=2, ep=9, tp=4, experts="width").expert_ranks == 9


def test_links_that_axes_cross():
    hgx, rack = preset("hgx-ib-16"), preset("nvl72")
    assert hgx.span("tp").link == "local"
    assert hgx.span("ep").link == "network"
    assert hgx.span("dp").link == "none"
    assert (hgx.span("ep", "tp").size, hgx.span("ep", "tp").domains) == (16, 2)
    assert rack.span("ep", "tp").link == "local"
    both = preset("hgx-ib-16").with_axes(ep=1, tp=16)
    assert (both.span("tp").domains, both.span("tp").size_per_domain) == (2, 8)
    # Groups along dp with stride 1 stay inside a node although dp is the outer axis.
    assert preset("hgx-ib-8").with_axes(dp=4, tp=2).span("dp").link == "local"
    with pytest.raises(ValueError, match="no mesh axis 'pp'"):
        rack.span("pp")


def test_every_preset_names_a_machine_that_adds_up():
    for machine in PRESETS.values():
        topology = machine.topology
        assert topology.num_nodes * topology.gpus_per_node == topology.num_gpus
        assert topology.num_domains * topology.gpus_per_domain == topology.num_gpus


def test_machines_beyond_a_rack():
    """Racks of 72 GPUs, and nodes of 8, on a network; a tp group stays in its domain, ep of several racks does not."""
    eight = preset("nvl72x8")
    assert (eight.topology.num_gpus, eight.topology.num_domains, eight.layout.num_devices) == (576, 8, 576)
    assert eight.span("ep", "tp").link == "local"
    assert eight.span("dp").link == "network"
    assert eight.with_axes(dp=1, ep=576, tp=1).span("ep").domains == 8
    with pytest.raises(LayoutError, match="needs 1152 GPUs and nvl72x8 has 576"):
        eight.with_axes(dp=2, ep=72, tp=8)
    nodes = preset("hgx-ib-144")
    assert (nodes.topology.num_gpus, nodes.topology.num_domains, nodes.layout.num_devices) == (144, 18, 144)
