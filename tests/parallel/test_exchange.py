"""Every exchange against a plain loop over rows and experts, for routing that is random and routing that is not.

Small INT4 experts, float32. Tolerance 1e-4 on outputs with a standard deviation of about 1, as for logits.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kimi_jax.parallel.counters import counting
from kimi_jax.parallel.exchange import BACKENDS, allgather, alltoall, auto, ragged
from kimi_jax.parallel.exchange.choice import buffer_rows, chosen, expert_rows
from kimi_jax.parallel.exchange.hierarchical import hierarchical
from kimi_jax.parallel.placement import EMPTY, even_placement
from kimi_jax.quantization import Int4Weight, dequantize, quantize
from meshes.devices import build_mesh
from meshes.presets import Layout, Preset, preset
from meshes.targets import topology_devices
from pallas_kernels.int4_moe import int4_moe

TOLERANCE = 1e-4
HIDDEN, TOP_K = 32, 4

LAYOUTS = {
    "local": preset("local"),
    "hgx-ib-16 ep 2": preset("hgx-ib-16"),
    "hgx-ib-16 replicas": preset("hgx-ib-16").with_axes(dp=2, ep=1, tp=8),
    "hgx-ib-16 wide ep": preset("hgx-ib-16").with_axes(dp=1, ep=16, tp=1),
    "nvl36": preset("nvl36"),
    "nvl72 ep 9": preset("nvl72"),
    "nvl72 ep 72": preset("nvl72").with_axes(dp=1, ep=72, tp=1),
    "nvl72 dp 9": preset("nvl72").with_axes(dp=9, ep=1, tp=8),
    "nvl72 tp 64": preset("nvl72").with_axes(ep=1, tp=64),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Routed experts of one layer, rows and their routing, with the answer."""

    rows: np.ndarray
    slots: np.ndarray
    weights: np.ndarray
    stacks: tuple[Int4Weight, ...]
    expected: np.ndarray


@functools.cache
def stacks_of(num_slots: int, width: int) -> tuple[Int4Weight, ...]:
    rng = np.random.default_rng(num_slots)
    shapes = ((width, HIDDEN), (width, HIDDEN), (HIDDEN, width))
    return tuple(
        quantize(jnp.asarray(rng.normal(size=(num_slots, *s)) / np.sqrt(s[1]) * 1.5, jnp.float32)) for s in shapes
    )


def silu(x):
    return x / (1 + np.exp(-x))


def case_of(slots: np.ndarray, num_slots: int, width: int) -> Case:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(len(slots), HIDDEN)).astype(np.float32)
    weights = rng.uniform(0.1, 1.0, slots.shape).astype(np.float32)
    stacks = stacks_of(num_slots, width)
    gate, up, down = (np.asarray(dequantize(stack), np.float64) for stack in stacks)
    expected = np.zeros(rows.shape)
    for row, k in np.argwhere(slots < num_slots):
        slot, x = slots[row, k], rows[row].astype(np.float64)
        expected[row] += weights[row, k] * (down[slot] @ (silu(gate[slot] @ x) * (up[slot] @ x)))
    return Case(rows, slots.astype(np.int32), weights, stacks, expected)


def routing(kind: str, layout: Layout, num_rows: int, num_experts: int) -> tuple[np.ndarray, int]:
    """Slots of every row of the batch, and the number of slots."""
    placement = even_placement(num_experts, layout.expert_ranks)
    held = np.array(placement.slot_experts)
    rng = np.random.default_rng(2)
    experts = np.stack([rng.choice(num_experts, TOP_K, replace=False) for _ in range(num_rows)])
    if kind == "one expert":  # every row chooses expert 5, the others differ
        experts = np.where(experts == 5, experts[:, :1], experts)
        experts[:, 0] = 5
    slots = np.array(placement.slots_of(jnp.asarray(experts)))
    if kind == "one rank":  # every row chooses all it can of the last rank that holds anything
        per_rank = held.reshape(layout.expert_ranks, -1)
        rank = np.flatnonzero((per_rank != EMPTY).any(1))[-1]
        inside = rank * per_rank.shape[1] + np.flatnonzero(per_rank[rank] != EMPTY)[:TOP_K]
        slots[:, : len(inside)] = inside
    if kind == "padded neighbour" and (held == EMPTY).any():  # the slots before and after the first empty one
        empty = int(np.flatnonzero(held == EMPTY)[0])
        near = [slot for slot in (empty - 1, empty + 1) if 0 <= slot < len(held) and held[slot] != EMPTY]
        slots[:, : len(near)] = near
    if kind == "idle rank":  # the first rank's experts are chosen by nobody, the first device's rows are padding
        per_rank = len(held) // layout.expert_ranks
        slots = np.where(slots < per_rank, len(held), slots)
        if layout.dp * layout.ep > 1:
            slots[: num_rows // (layout.dp * layout.ep)] = len(held)
    return slots, len(held)


@functools.cache
def runner(backend, machine: Preset, devices=None, on_overflow="branch"):
    """The compiled layer: rows over dp and ep, experts where the layout puts them, the sum over tp at the end."""
    layout = machine.layout
    mesh = build_mesh(machine, devices or jax.devices())
    experts_on = "tp" if layout.experts == "width" else None
    wide = PartitionSpec(layout.expert_axes, experts_on)
    tall = PartitionSpec(layout.expert_axes, None, experts_on)

    def layer(rows, slots, weights, gate, up, down):
        num_local = gate.packed.shape[0]

        def experts(x, ids, w, routed_rows=None):
            return int4_moe(x, ids, w, gate, up, down, routed_rows=routed_rows).astype(x.dtype)

        with counting(on_overflow=on_overflow) as counted:
            partial = backend(rows, slots, weights, experts, num_local, expert_axes=layout.expert_axes)
        overflow = counted.overflows[0] if counted.overflows else jnp.bool_(False)
        return jax.lax.psum(partial, "tp"), jax.lax.psum(overflow.astype(jnp.int32), "tp")[None]

    batch = PartitionSpec(("dp", "ep"))
    in_specs = (batch, batch, batch, wide, wide, tall)
    return jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=in_specs, out_specs=(batch, batch), check_vma=False))


def run(backend, machine: Preset, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The layer's output, and for each device group how many of its tp ranks saw an overflow."""
    with jax.default_matmul_precision("highest"):
        out, overflows = runner(backend, machine)(case.rows, case.slots, case.weights, *case.stacks)
    return np.asarray(out), np.asarray(overflows)


def overflowing_ranks(layout: Layout, slots: np.ndarray, num_slots: int, capacity: int) -> np.ndarray:
    """By device group: tp ranks of whose exchange some buffer is too small, counted from the routing alone."""
    if layout.ep == 1:
        return np.zeros(layout.dp, int)
    per_rank = num_slots // layout.expert_ranks
    shape = (layout.dp, layout.ep, -1, TOP_K)  # of senders
    ranks = np.where(slots < num_slots, slots // per_rank, -1).reshape(shape)
    due = np.stack([(ranks == rank).any(-1).sum(-1) for rank in range(layout.expert_ranks)])  # [ranks, dp, ep]
    columns = layout.tp if layout.experts == "slots" else 1
    over = (due.reshape(layout.ep, columns, layout.dp, layout.ep) > capacity).any((0, 3)).sum(0)
    return np.repeat(over * (layout.tp // columns), layout.ep)


KINDS = ["random", "one expert", "one rank", "padded neighbour", "idle rank"]
ROWS = 6


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("auto", "ragged")])
def test_exact_for_any_routing(backend, name, kind):
    """`auto` is one of the others, and `ragged` has tests of its own below."""
    machine, backend = LAYOUTS[name], BACKENDS[backend].run
    layout = machine.layout
    slots, num_slots = routing(kind, layout, layout.dp * layout.ep * ROWS, num_experts=24)
    case = case_of(slots, num_slots, width=32)
    assert case.expected.std() > 0.1 or (kind == "idle rank" and layout.expert_ranks == 1)
    capacity = buffer_rows(ROWS, TOP_K, num_slots, num_slots // layout.expert_ranks, layout.ep)
    out, overflows = run(backend, machine, case)
    np.testing.assert_allclose(out, case.expected, atol=TOLERANCE)
    expected = overflowing_ranks(layout, slots, num_slots, capacity if backend is alltoall else ROWS)
    np.testing.assert_array_equal(overflows, expected)


@pytest.mark.core
@pytest.mark.parametrize("name", ["hgx-ib-16 ep 2", "hgx-ib-16 wide ep"])
@pytest.mark.parametrize("capacity", [1, 3, 5])
def test_too_small_buffers_take_the_exact_path(name, capacity):
    """Buffers of any size give the same output; the step is counted on exactly the ranks whose exchange overflowed."""
    machine = LAYOUTS[name]
    backend = small_buffers(capacity)
    seen = set()
    for kind in ("random", "one rank", "idle rank"):
        slots, num_slots = routing(kind, machine.layout, machine.layout.ep * ROWS, num_experts=24)
        case = case_of(slots, num_slots, width=32)
        out, overflows = run(backend, machine, case)
        np.testing.assert_allclose(out, case.expected, atol=TOLERANCE)
        expected = overflowing_ranks(machine.layout, slots, num_slots, capacity)
        np.testing.assert_array_equal(overflows, expected)
        seen |= set(expected.tolist())
    assert capacity > 3 or max(seen) > 0


@functools.cache
def small_buffers(capacity: int):
    return functools.partial(alltoall, capacity=capacity)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("hgx-ib-16 replicas", allgather),
        ("hgx-ib-16 ep 2", allgather),
        ("hgx-ib-16 ep 2", alltoall),
        ("nvl72 tp 64", allgather),
        ("hgx-ib-16 ep 2", hierarchical),
    ],
)
def test_experts_cut_along_their_width(name, backend):
    machine = LAYOUTS[name]
    layout = dataclasses.replace(machine.layout, experts="width")
    for kind in ("random", "one expert", "one rank"):
        slots, num_slots = routing(kind, layout, layout.dp * layout.ep * ROWS, num_experts=8)
        case = case_of(slots, num_slots, width=32 * layout.tp)
        out, _ = run(backend, machine.with_layout(layout), case)
        np.testing.assert_allclose(out, case.expected, atol=TOLERANCE * np.sqrt(layout.tp))


def test_ragged_is_refused_on_the_cpu():
    machine = LAYOUTS["hgx-ib-16 ep 2"]
    slots, num_slots = routing("random", machine.layout, machine.layout.ep * ROWS, num_experts=24)
    with pytest.raises(ValueError, match="XLA does not implement ragged-all-to-all on the CPU"):
        run(ragged, machine, case_of(slots, num_slots, width=32))


@pytest.mark.parametrize("name", ["hgx-ib-16 ep 2", "hgx-ib-16 wide ep"])
def test_ragged_with_the_collective_written_out(name, monkeypatch):
    """The CPU has no ragged-all-to-all; its definition in terms of all-gathers checks sizes, offsets and the way back.

    As `jax.lax.ragged_all_to_all` documents it: rank s writes operand[input_offsets[d] : … + send_sizes[d]] of its own
    to output_offsets[d] of rank d.
    """

    def written_out(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        me = jax.lax.axis_index(axis_name)
        gathered = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
        for sender in range(jax.lax.axis_size(axis_name)):
            theirs, starts, sizes, places = (part[sender] for part in gathered)
            row = jnp.arange(operand.shape[0])
            target = jnp.where(row < sizes[me], places[me] + row, output.shape[0])
            output = output.at[target].set(theirs[(starts[me] + row) % operand.shape[0]], mode="drop")
            output = jnp.where(recv_sizes[sender] == sizes[me], output, jnp.uint32(0xFFFFFFFF))  # both sides must agree
        return output

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", written_out)
    monkeypatch.setattr("kimi_jax.parallel.exchange.ragged_all_to_all._refuse_cpu", lambda: None)
    machine = LAYOUTS[name]
    for kind in KINDS:
        slots, num_slots = routing(kind, machine.layout, machine.layout.ep * ROWS, num_experts=24)
        case = case_of(slots, num_slots, width=32)
        out, _ = run(written_out_ragged, machine, case)
        np.testing.assert_allclose(out, case.expected, atol=TOLERANCE)


def written_out_ragged(*args, **kwargs):
    """A name of its own in the cache of compiled layers."""
    return ragged(*args, **kwargs)


def test_ragged_compiles_for_absent_gpus():
    """Three collectives: the counts, the rows, and the sums on their way back."""
    machine = LAYOUTS["hgx-ib-16 ep 2"]
    mesh = build_mesh(machine, topology_devices(machine, "h200"))
    batch = PartitionSpec(("dp", "ep"))

    def layer(rows, slots, weights):
        def experts(x, ids, w, routed_rows=None):
            return x * (w * (ids < 3)).sum(-1, keepdims=True)

        return ragged(rows, slots, weights, experts, 3)

    mapped = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=batch, out_specs=batch, check_vma=False))
    shapes = ((HIDDEN, jnp.float32), (TOP_K, jnp.int32), (TOP_K, jnp.float32))
    lowered = mapped.lower(*(jax.ShapeDtypeStruct((2 * ROWS, size), dtype) for size, dtype in shapes))
    assert len(re.findall(r"stablehlo\.all_to_all", lowered.as_text())) == 1
    # XLA adds small ones of its own for the offsets; the rows travel in these two.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", lowered.compile().as_text())) == 2


def test_buffers_hold_the_expected_load():
    """384 experts on 72 ranks in 432 slots, top-8: a row needs a rank with probability 0.106 to 0.12."""
    sizes = [buffer_rows(rows, 8, 432, 6, 72) for rows in (1, 17, 34, 256, 2048)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1
    rng = np.random.default_rng(0)
    for rows, size in zip((17, 256), sizes[1::2], strict=True):
        choices = np.stack([rng.choice(432, 8, replace=False) for _ in range(rows * 50)]) // 6
        due = np.stack([(choices == rank).any(1) for rank in range(72)]).reshape(72, 50, rows).sum(-1)
        assert due.mean() < size < rows
        assert due.max() <= size
    assert buffer_rows(2048, 8, 432, 6, 72) < 2048 / 4
    assert buffer_rows(100, 4, 4, 1, 4) == 100  # every row needs every rank: then nothing can overflow


@pytest.mark.parametrize("rows", [24, 136])
def test_experts_are_told_how_many_rows_chose_among_them(rows):
    """By the numbers that reports on tile sizes take: the room of a buffer says little of what arrives."""
    machine = LAYOUTS["nvl72 ep 9"]
    layout, top_k, num_slots, told = machine.layout, 8, 432, []

    def experts(x, ids, w, routed_rows=None):
        told.append((x.shape[0], routed_rows or x.shape[0]))
        return x

    def layer(rows, slots, weights):
        return auto(rows, slots, weights, experts, num_slots // layout.expert_ranks)

    mesh, batch = build_mesh(machine, jax.devices()), PartitionSpec(("dp", "ep"))
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=batch, out_specs=batch, check_vma=False)
    kinds = ((HIDDEN, jnp.float32), (top_k, jnp.int32), (top_k, jnp.float32))
    with counting(on_overflow="report"):
        jax.eval_shape(mapped, *(jax.ShapeDtypeStruct((9 * rows, size), dtype) for size, dtype in kinds))
    assert told == [(9 * expert_rows(layout, rows, top_k, num_slots), 9 * rows)]
    assert (told[0][0] < 9 * rows) == (rows == 136)


def test_a_report_sends_nothing_twice():
    """Whoever throws an overflowed step away gets a program without a choice, and whoever wants it exact no buffers."""
    machine = LAYOUTS["hgx-ib-16 wide ep"]
    slots, num_slots = routing("one rank", machine.layout, machine.layout.ep * ROWS, num_experts=24)
    case = case_of(slots, num_slots, width=32)
    for kind, told, exact in (("branch", 1, True), ("report", 1, False), ("exact", 0, True)):
        lowered = runner(small_buffers(1), machine, on_overflow=kind).lower(
            case.rows, case.slots, case.weights, *case.stacks
        )
        text = lowered.as_text()
        assert ("stablehlo.case" in text) == (kind == "branch")
        assert ("stablehlo.all_to_all" in text) == (kind != "exact")
        if kind == "branch":
            continue  # run by the tests above
        with jax.default_matmul_precision("highest"):
            out, overflows = runner(small_buffers(1), machine, on_overflow=kind)(
                case.rows, case.slots, case.weights, *case.stacks
            )
        assert np.allclose(out, case.expected, atol=TOLERANCE) == exact
        assert (np.asarray(overflows) == told).all()


def test_auto_takes_buffers_where_they_halve_what_travels():
    assert chosen(1, 8, 432, 6, 72) == "allgather"
    assert chosen(34, 8, 432, 6, 72) == "allgather"
    assert chosen(136, 8, 432, 6, 72) == "alltoall"
    assert chosen(136, 8, 384, 192, 2) == "allgather"
    assert chosen(4096, 8, 384, 384, 1) == "allgather"
    assert chosen(32, 8, 384, 24, 2, sharing=8) == "allgather"
    assert chosen(512, 8, 384, 24, 2, sharing=8) == chosen(136, 8, 432, 6, 9, sharing=8) == "hierarchical"
    assert chosen(1024, 8, 432, 6, 9, sharing=8) == "alltoall"
    machine = LAYOUTS["hgx-ib-16 wide ep"]
    slots, num_slots = routing("random", machine.layout, machine.layout.ep * 256, num_experts=128)
    case = case_of(slots, num_slots, width=32)
    assert chosen(256, TOP_K, num_slots, num_slots // 16, 16) == "alltoall"
    np.testing.assert_allclose(run(auto, machine, case)[0], case.expected, atol=TOLERANCE)
