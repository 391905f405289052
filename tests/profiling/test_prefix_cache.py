"""Slots that share pages, compiled for GPUs that are not here: what a hit moves, and that rounds move none of it."""

import dataclasses
import runpy
from pathlib import Path

import jax
import pytest

from kimi_jax.decoding.state import Hits
from kimi_jax.parallel.sharding import REQUESTS
from kimi_jax.profiling import compile as compiling
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.traffic import host_transfers, materialised

CASES = runpy.run_path(str(Path(__file__).with_name("compiled.py")))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[("hgx-ib-16", "b300"), ("nvl72", "gb300")], ids=lambda pair: pair[0])
def case(request):
    """Rounds of two layers, and pages for 16 times as many tokens as the drafter's window has; on cards of one
    architecture, since a process compiles for the first that it meets."""
    case = CASES["case_of"](*request.param, "round", 6, 2, "reduced")
    return dataclasses.replace(case, drafter=dataclasses.replace(case.drafter, draft_window=128))


def arguments_of(case):
    """Programs, and what a round takes where prompts share pages; all of it abstract."""
    programs = compiling._absent_programs(case)
    parameters, plain, now = compiling.program_arguments(case, programs, compiling.abstract_parameters(programs))
    slots, mesh = case.padded_requests, programs.mesh
    tiles = case.capacity // programs.page_tokens
    start = {"slots": slots, "pages": slots * tiles, "capacity": case.capacity, "shared": True}
    pages = jax.eval_shape(lambda: programs.start(**start)).context_pages
    spec = programs.state_specs.context_pages
    pages = jax.tree.map(lambda leaf: compiling._array(mesh, leaf.shape, leaf.dtype, spec), pages)
    state = dataclasses.replace(plain, context_pages=pages)
    groups = programs.groups
    hits = [compiling._array(mesh, shape, "int32", REQUESTS) for shape in ((groups,), (groups,), (groups, tiles))]
    return programs, parameters, state, now, Hits(*hits)


def bytes_of(tree) -> int:
    """On one device."""
    return sum(
        leaf.dtype.itemsize * jax.numpy.prod(jax.numpy.array(leaf.sharding.shard_shape(leaf.shape))).item()
        for leaf in jax.tree.leaves(tree)
    )


def test_a_hit_moves_the_drafters_window(case):
    programs, _, state, _, hits = arguments_of(case)
    compiled = programs.restore.lower(state, hits).compile()
    module, memory = Module(compiled.as_text()), compiled.memory_analysis()
    window = bytes_of(state.context) // case.device_requests
    assert bytes_of(state.context_pages) >= 16 * bytes_of(state.context)
    assert {found.array.partition(".")[0] for found in materialised(module, 1 << 10, 0)} <= {"state"}
    assert sum(found.bytes for found in materialised(module, 1 << 10, 0)) <= 2 * window
    assert memory.temp_size_in_bytes <= 2 * window
    assert memory.alias_size_in_bytes >= bytes_of((state.cache, state.context, state.context_pages))
    assert host_transfers(module) == []


def test_a_round_writes_the_pools_where_they_are(case):
    programs, parameters, state, now, _ = arguments_of(case)
    with jax.default_matmul_precision("highest"):
        compiled = programs.round.lower(parameters, state, now).compile()
    module = Module(compiled.as_text())
    pools = [f"state.{name}" for name in ("cache", "context")]
    assert any("context_pages" in name for name in module.arguments.values())
    assert not [found for found in materialised(module, 1 << 10, 0.01) if found.array.startswith(tuple(pools))]
    memory, held = compiled.memory_analysis(), (state.cache, state.context, state.context_pages)
    assert memory.alias_size_in_bytes >= bytes_of(held)
