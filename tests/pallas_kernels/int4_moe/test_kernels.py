"""The kernels in Pallas's interpreter with race detection, the per-thread code on emulated registers."""

import functools
import runpy
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_moe import TOLERANCE, Plan, Target, int4_moe, self_check
from pallas_kernels.int4_moe.api import run
from pallas_kernels.int4_moe.engine import Engine
from pallas_kernels.int4_moe.tile import Tile

problems = runpy.run_path(str(Path(__file__).with_name("problems.py")))
Problem, relative_error = problems["Problem"], problems["relative_error"]

ENGINES = {"mma": 8, "wgmma": 16, "tcgen05": 16}
H200, GB300 = Target("NVIDIA H200", "9.0", 3), Target("NVIDIA GB300", "10.3", 3)


def interpreter():
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))


def small_plan(engine, *, k_gate_up=128, k_down=64, warpgroups=1, split=1, ctas=2):
    tile = functools.partial(Tile, engine, ENGINES[engine], warpgroups, stages=2)
    return Plan("auto", "test", tile(k_step=k_gate_up, split=split), tile(k_step=k_down), ctas=ctas)


def check(plan, problem, rows, top_k, kinds):
    """One compiled program over several routings of the same size."""
    call = jax.jit(functools.partial(run, plan, interpret=True))
    for kind in kinds:
        x = problem.activations(rows, ml_dtypes.bfloat16)
        ids, weights = problem.routing(rows, top_k, kind)
        with interpreter():
            got = np.asarray(call(x, ids, weights, *problem.weights()))
        assert got.dtype == np.float32
        assert np.isfinite(got).all(), kind
        expected = problem.expected(x, ids, weights)
        assert relative_error(got, expected) < TOLERANCE, kind
        if kind == "foreign":
            assert not got.any()


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_matches_numpy(engine):
    """Unused shared and device memory is NaN in the interpreter, so a padded row that was read would show."""
    problem = Problem(slots=3, hidden=128, width=64)
    problem.codes[0][0] = 0  # q = -8
    problem.scales[2][1] = 0
    check(small_plan(engine), problem, 11, 2, ("random", "one expert", "foreign"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [1, 7, 33, 64, 257])
def test_row_counts(engine, rows):
    problem = Problem(slots=5, hidden=128, width=128, seed=rows)
    kinds = ("random", "one expert", "every expert once", "the same experts", "foreign")
    check(small_plan(engine, k_down=128), problem, rows, 3, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_several_steps_and_warpgroups(engine):
    """Scales as boxes of the matrix, a ring that wraps within an item, two warpgroups, k shared between CTAs."""
    problem = Problem(slots=3, hidden=512, width=256, seed=5)
    for split in (1, 2):
        plan = small_plan(engine, k_gate_up=256, k_down=256, warpgroups=2, split=split, ctas=3)
        check(plan, problem, 9, 2, ("random", "the same experts"))


@pytest.mark.slow
@pytest.mark.parametrize("target", [H200, GB300], ids=["h200", "gb300"])
def test_self_check_passes(target):
    with interpreter():
        checks = self_check(target, interpret=True)
    assert len(checks) == 2
    assert all(c.relative_error < TOLERANCE for c in checks)


def test_self_check_refuses_a_wrong_kernel(monkeypatch):
    def broken(chosen, x, *operands, interpret):
        return run(Plan("reference", "test"), x, *operands) * 1.01

    monkeypatch.setattr("pallas_kernels.int4_moe.api.run", broken)
    with pytest.raises(RuntimeError, match="differs from its reference on NVIDIA H200"):
        self_check(H200)


def test_self_check_has_nothing_to_do_on_a_cpu():
    assert self_check(Target("cpu", "", 1)) == []


def _no_wait_for_the_copy(monkeypatch):
    namespace = SimpleNamespace(**{name: getattr(plgpu, name) for name in ("load", "layout_cast", "barrier_arrive")})
    namespace.barrier_wait = lambda barrier: None
    monkeypatch.setattr("pallas_kernels.int4_moe.warp.plgpu", namespace)


def _slot_released_without_a_fence(monkeypatch):
    monkeypatch.setattr(Engine, "release", lambda self, refs, slot: plgpu.barrier_arrive(refs["empty"].at[slot]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_no_wait_for_the_copy, _slot_released_without_a_fence])
def test_a_missing_wait_is_seen(fault, monkeypatch):
    problem = Problem(slots=3, hidden=128, width=64)
    fault(monkeypatch)
    with pytest.raises(Exception, match=r"(?i)race"):
        check(small_plan("mma", ctas=1), problem, 11, 2, ("random",))


@pytest.mark.slow
def test_ranks_sum_to_the_whole():
    """Expert parallel over two ranks, in turn: the interpreter has one shared memory for all devices of a process."""
    problem = Problem(slots=4, hidden=128, width=64, seed=8)
    x = problem.activations(9, ml_dtypes.bfloat16)
    ids, weights = problem.routing(9, 2, "the same experts")
    ids[::2] += 2
    call = jax.jit(functools.partial(int4_moe, implementation="warp", target=H200, interpret=True))
    with interpreter():
        parts = [
            np.asarray(call(x, ids - first, weights, *[w[first : first + 2] for w in problem.weights()]))
            for first in (0, 2)
        ]
    assert all(part.any() for part in parts)
    assert relative_error(sum(parts), problem.expected(x, ids, weights)) < TOLERANCE
