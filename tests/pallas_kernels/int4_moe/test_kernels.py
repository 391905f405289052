"""What the table of cases does not hold: seeded faults, and ranks that add up. In the interpreter, with races."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_moe import OPERATION, Shape, int4_moe
from pallas_kernels.int4_moe.engine import Engine
from pallas_kernels.int4_moe.shapes import problem
from pallas_kernels.operation import Case, Device, check, differences

H200 = Device("NVIDIA H200", "9.0", 3)


def _no_wait_for_the_copy(monkeypatch):
    namespace = SimpleNamespace(**{name: getattr(plgpu, name) for name in ("load", "layout_cast", "barrier_arrive")})
    namespace.barrier_wait = lambda barrier: None
    monkeypatch.setattr("pallas_kernels.int4_moe.warp.plgpu", namespace)


def _slot_released_without_a_fence(monkeypatch):
    monkeypatch.setattr(Engine, "release", lambda self, refs, slot: plgpu.barrier_arrive(refs["empty"].at[slot]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_no_wait_for_the_copy, _slot_released_without_a_fence])
def test_a_missing_wait_is_seen(fault, monkeypatch):
    fault(monkeypatch)
    case = Case(Shape(11, 2, 3, 128, 64, 3), {}, {"stages": 2, "ctas": 1})
    with pytest.raises(Exception, match=r"(?i)race"):
        check(OPERATION, "fault", case, H200, "warp", plgpu.InterpretGPUParams(detect_races=True))


@pytest.mark.slow
def test_ranks_sum_to_the_whole(oracles):
    """Expert parallel over two ranks, in turn: the interpreter has one shared memory for all devices of a process."""
    shape = Shape(9, 2, 4, 128, 64, 4)
    x, ids, router, *stacks = problem(shape)

    @jax.jit
    def rank(ids, *stacks):
        return int4_moe(
            x, ids, router, *stacks, implementation="warp", device=H200, interpret=plgpu.InterpretGPUParams()
        )

    parts = [
        rank(ids - first, *[jax.tree.map(lambda w, first=first: w[first : first + 2], s) for s in stacks])
        for first in (0, 2)
    ]
    assert all(np.any(part) for part in parts)
    (found,) = differences(jnp.add(*parts), oracles["int4_moe"](x, ids, router, *stacks))
    assert OPERATION.tolerances[0].exceeded(found) == []
