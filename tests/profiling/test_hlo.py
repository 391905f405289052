"""The HLO reader on a small hand-written program whose answers are known, and on every notation of groups."""

import re

import pytest

from kimi_jax.ledger.launches import Launches
from kimi_jax.profiling.hlo import Module, part_of
from kimi_jax.profiling.messages import Collective, collectives, mesh_axes, replica_groups
from kimi_jax.profiling.traffic import (
    Kernel,
    Materialised,
    custom_calls,
    host_transfers,
    intermediates,
    kernels,
    launches,
    materialised,
    reads,
)

MESH = {"dp": 1, "ep": 3, "tp": 4}

# A loop of seven runs around a gather, a copied weight, a sliced one, a cache updated in place, and two kernels.
PROGRAM = """HloModule jit_round, is_scheduled=true, num_partitions=12

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%moving (p.0: bf16[1024,2048]) -> bf16[2048,1024] {
  %p.0 = bf16[1024,2048]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[2048,1024]{1,0} transpose(%p.0), dimensions={1,0}
}

%summing (p.6: bf16[8,512]) -> bf16[8,512] {
  %p.6 = bf16[8,512]{1,0} parameter(0)
  ROOT %psum.1 = bf16[8,512]{1,0} all-reduce(%p.6), channel_id=2, replica_groups=mesh['dp'=1,'ep'=3,'tp'=4] {'tp'}, to_apply=%sum, metadata={op_name="jit(round)/layer1/reductions/psum"}
}

%slicing (p.1: bf16[4096,512], p.2: s32[8]) -> bf16[8,512] {
  %p.1 = bf16[4096,512]{1,0} parameter(0)
  %p.2 = s32[8]{0} parameter(1)
  ROOT %gather.1 = bf16[8,512]{1,0} gather(%p.1, %p.2), offset_dims={1}
}

%writing (p.3: bf16[8,1024,64], p.4: bf16[8,1,64], p.5: s32[8]) -> bf16[8,1024,64] {
  %p.3 = bf16[8,1024,64]{2,1,0} parameter(0)
  %p.4 = bf16[8,1,64]{2,1,0} parameter(1)
  %p.5 = s32[8]{0} parameter(2)
  ROOT %dynamic-update-slice.1 = bf16[8,1024,64]{2,1,0} dynamic-update-slice(%p.3, %p.4, %p.5)
}

%body (carry: (s32[], bf16[1024,2048])) -> (s32[], bf16[1024,2048]) {
  %carry = (s32[], bf16[1024,2048]{1,0}) parameter(0)
  %step = s32[] get-tuple-element(%carry), index=0
  %kept = bf16[1024,2048]{1,0} get-tuple-element(%carry), index=1
  %half = bf16[512,2048]{1,0} slice(%kept), slice={[0:512], [0:2048]}, metadata={op_name="jit(round)/while/body/tree/slice"}
  ROOT %out = (s32[], bf16[1024,2048]{1,0}) tuple(%step, %kept)
}

%condition (carry.1: (s32[], bf16[1024,2048])) -> pred[] {
  %carry.1 = (s32[], bf16[1024,2048]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (w: bf16[1024,2048], e: bf16[4096,512], c: bf16[8,1024,64], t: s32[8], n: bf16[8,1,64]) -> bf16[8,1024,64] {
  %w = bf16[1024,2048]{1,0} parameter(0), metadata={op_name="parameters[\\'target\\'][\\'model\\'][\\'layers\\'][0][\\'w\\']"}
  %e = bf16[4096,512]{1,0} parameter(1), metadata={op_name="parameters['target']['model']['embed_tokens']['weight']"}
  %c = bf16[8,1024,64]{2,1,0} parameter(2), metadata={op_name="state.cache[0].rope"}
  %t = s32[8]{0} parameter(3), metadata={op_name="state.anchors"}
  %n = bf16[8,1,64]{2,1,0} parameter(4), metadata={op_name="new"}
  %turned = bf16[2048,1024]{1,0} fusion(%w), kind=kInput, calls=%moving, metadata={op_name="jit(round)/layer0/attention/dot"}
  %rows = bf16[8,512]{1,0} fusion(%e, %t), kind=kLoop, calls=%slicing, metadata={op_name="jit(round)/gather"}
  %all-reduce-start = bf16[8,512]{1,0} all-reduce-start(%rows), channel_id=1, replica_groups=[3,4]<=[12], to_apply=%sum, metadata={op_name="jit(round)/layer0/reductions/psum"}
  %all-reduce-done = bf16[8,512]{1,0} all-reduce-done(%all-reduce-start), metadata={op_name="jit(round)/layer0/reductions/psum"}
  %fusion-start = ((bf16[8,512]{1,0}), bf16[8,512]{1,0}) fusion-start(%all-reduce-done), kind=kCustom, calls=%summing
  %fusion-done = bf16[8,512]{1,0} fusion-done(%fusion-start)
  %all-gather-start = (bf16[8,512]{1,0}, bf16[24,512]{1,0}) all-gather-start(%all-reduce-done), replica_groups=[4,3]<=[3,4]T(1,0), dimensions={0}, metadata={op_name="jit(round)/layer0/experts/exchange/all_gather"}
  %all-gather-done = bf16[24,512]{1,0} all-gather-done(%all-gather-start)
  %custom-call.1 = f32[24,512]{1,0} custom-call(%all-gather-done, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(round)/layer0/experts/int4_gate_up"}
  %custom-call.2 = f32[24,512]{1,0} custom-call(%custom-call.1, %w, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(round)/layer0/experts/int4_gate_up/mpmd_map"}
  %zero = s32[] constant(0)
  %start = (s32[], bf16[1024,2048]{1,0}) tuple(%zero, %w)
  %loop = (s32[], bf16[1024,2048]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %commit = bf16[8,1024,64]{2,1,0} fusion(%c, %n, %t), kind=kLoop, calls=%writing, metadata={op_name="jit(round)/scatter"}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def module():
    return Module(PROGRAM)


def test_messages(module):
    assert collectives(module, MESH) == [
        Collective("all-gather", ("ep",), 24 * 512 * 2, 1, "exchange"),
        Collective("all-reduce", ("tp",), 8 * 512 * 2, 2, "reductions"),
    ]


def test_kernels(module):
    assert kernels(module) == [Kernel("int4_gate_up", "experts", 2)]
    assert custom_calls(module) == {"mosaic_gpu_v2": 2}


def test_reads_follow_loops_and_slices(module):
    w, rows = 1024 * 2048 * 2, 8 * 512 * 2
    assert reads(module) == {
        ("target.model.layers.0.w", "attention"): w,
        ("target.model.layers.0.w", "experts"): 2 * w,
        ("target.model.layers.0.w", "tree"): 7 * w // 2,
        ("target.model.embed_tokens.weight", "other"): rows,
        ("state.anchors", "other"): 2 * 8 * 4,
        ("state.cache.0.rope", "other"): 0,
        ("new", "other"): 8 * 64 * 2,
    }


def test_intermediates_leave_out_arguments_and_kernels(module):
    row = 8 * 512 * 2
    assert intermediates(module) == {
        "attention": 1024 * 2048 * 2,  # the turned weight, written
        "tree": 7 * 512 * 2048 * 2,  # the slice of every run of the loop
        "reductions": 2 * row + 2 * row,  # the second sum is wrapped: it goes where it reads from
        "exchange": row + 3 * row,
        "other": row + 8 * 64 * 2,  # gathered rows, the cache's update
    }


def test_copies_are_found_and_updates_in_place_are_none(module):
    found = materialised(module)
    assert sorted(found, key=lambda m: m.operation) == [
        Materialised("target.model.layers.0.w", "half", 512 * 2048 * 2, "tree"),
        Materialised("target.model.layers.0.w", "turned", 1024 * 2048 * 2, "attention"),
    ]
    assert materialised(module, smallest=1 << 30) == []


def test_launches(module):
    """The loop of seven trips runs its slice seven times; of one of unknown length the host asks, as of a choice."""
    assert launches(module) == {
        "attention": Launches(kernels=1),
        "other": Launches(kernels=2),
        "reductions": Launches(collective_kernels=1, messages=1),
        "exchange": Launches(messages=1),
        "experts": Launches(kernels=2),
        "tree": Launches(kernels=7),
    }
    unknown = launches(Module(PROGRAM.replace(', backend_config={"known_trip_count":{"n":"7"}}', "")))
    assert sum(part.host_waits for part in unknown.values()) == 2
    choice = "%loop = (s32[], bf16[1024,2048]{1,0}) conditional(%zero, %start), branch_computations={%body}"
    asked = launches(Module(re.sub(r"%loop = .*", choice, PROGRAM)))
    assert sum(part.host_waits for part in asked.values()) == 1


def test_host_transfers(module):
    assert host_transfers(module) == []
    callback = PROGRAM.replace('"mosaic_gpu_v2"', '"xla_ffi_python_gpu_callback"', 1)
    assert len(host_transfers(Module(callback))) == 1


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("jit(round)/shard_map/layer3/attention/output/dot_general", "attention"),
        ("jit(round)/layer3/experts/exchange/all_gather", "exchange"),
        ("jit(round)/drafter/attention/dot", "drafter"),
        ("jit(round)/tree/vmap(tree)/top_k", "tree"),
        ("jit(round)/sampling/argmax", "head"),
        ("", "other"),
    ],
)
def test_parts(op_name, part):
    assert part_of(op_name) == part


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11}}, x", ("tp",)),
        ("replica_groups=[3,4]<=[12], x", ("tp",)),
        ("replica_groups=[4,3]<=[3,4]T(1,0), x", ("ep",)),
        ("replica_groups=[1,12]<=[12], x", ("ep", "tp")),
        ("replica_groups=mesh['ep'=3,'tp'=4] {'ep'}, x", ("ep",)),
        ("replica_groups=mesh['dp'=1,'ep'=3,'tp'=4] {'ep','tp'}, x", ("ep", "tp")),
    ],
)
def test_groups_are_mesh_axes(text, axes):
    assert mesh_axes(replica_groups(text), MESH) == axes


def test_groups_along_no_axis_are_refused():
    with pytest.raises(ValueError, match="run along no axes of the mesh"):
        mesh_axes([(0, 5), (1, 4)], MESH)


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        Module("nothing")


def test_instructions_that_lost_their_metadata_take_the_part_of_their_neighbours():
    """XLA's CPU compiler drops it from the matrix products that it rewrites."""
    text = """HloModule jit_round, is_scheduled=true

ENTRY %main (p: f32[4,8], w: f32[8,8]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0), metadata={op_name="state.x"}
  %w = f32[8,8]{1,0} parameter(1), metadata={op_name="parameters['target']['lm_head']['weight']"}
  %dot.1 = f32[4,8]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %exp.1 = f32[4,8]{1,0} exponential(%dot.1), metadata={op_name="jit(round)/layer0/attention/exp"}
  %dot.2 = f32[4,8]{1,0} dot(%exp.1, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %add.1 = f32[4,8]{1,0} add(%dot.2, %p), metadata={op_name="jit(round)/layer0/router/add"}
}
"""
    parts = {instruction.name: part_of(instruction.op_name) for _, instruction, _ in Module(text).executed()}
    assert parts["dot.1"] == "attention"  # what reads it
    assert parts["dot.2"] == "attention"  # what it reads comes first
    assert parts["p"] == "other"
    assert Module(text).arguments == {"p": "state.x", "w": "target.lm_head.weight"}
