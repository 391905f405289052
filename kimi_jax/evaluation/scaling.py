"""One round compiled for ever larger simulated meshes: what a device holds and sends, and what compiling takes.

Nothing is timed but the compiler: simulated devices share one processor, so how long a round runs on them says nothing
about a cluster. Bytes and messages are those of the compiled program, for one request a device group.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp

from kimi_jax.decoding.engine import Draft
from kimi_jax.decoding.generate import Limits, shape_of
from kimi_jax.decoding.loading import open_checkpoint
from kimi_jax.decoding.session import Session
from kimi_jax.profiling.case import Case
from kimi_jax.profiling.compile import compile_for
from kimi_jax.profiling.hlo import Module
from kimi_jax.profiling.messages import collectives
from meshes.devices import build_mesh, simulate
from meshes.presets import preset


@dataclasses.dataclass(frozen=True)
class Scale:
    """A round on one mesh."""

    mesh: str
    layout: str
    devices: int
    requests: int
    weight_bytes: int
    """Target and drafter on one device."""
    state_bytes: int
    """Caches, context and counters on one device."""
    messages: int
    """Collectives of a round."""
    message_bytes: int
    """What one device contributes to them in a round (what it holds after gathers)."""
    lower_seconds: float
    compile_seconds: float


def measure_scaling(
    checkpoint: Path,
    drafter: Path,
    meshes: Sequence[str],
    *,
    budget: int,
    context: int,
    stage: Callable[[str], None] = lambda name: None,
) -> Iterator[Scale]:
    """Compiles a round with trees of `budget` nodes on each mesh, the largest simulated first.

    Raises:
      LayoutError: a mesh that does not exist, or that the checkpoint's dimensions do not fit.
    """
    machines = [preset(name) for name in meshes]
    devices = simulate(max(machine.layout.num_devices for machine in machines))
    for machine in machines:
        mesh = build_mesh(machine, devices[: machine.layout.num_devices])
        stage(f"loading onto {machine.name}")
        engine = open_checkpoint(checkpoint, mesh, machine.layout, jnp.float32, drafter)
        assert engine.drafter is not None
        programs = engine.programs(Draft("ddtree", budget))
        requests = programs.groups
        shape = shape_of(programs, [context] * requests, [programs.steps] * requests, Limits())
        session = Session(programs, engine.parameters, shape)
        now = session.fill([[1] * context] * requests)
        case = Case(
            config=engine.config, preset=machine, gpu="cpu", requests=requests, context=context, budget=budget,
            drafter=engine.drafter.config, dtype=jnp.float32,
        )  # fmt: skip
        compiled, _ = compile_for(case, programs, (session.parameters, session.state, now), stage=stage)
        sent = collectives(Module(compiled.text), dict(mesh.shape))
        yield Scale(
            mesh=machine.name,
            layout=str(machine.layout),
            devices=machine.layout.num_devices,
            requests=requests,
            weight_bytes=sum(array.bytes for array in compiled.weights),
            state_bytes=sum(array.bytes for array in compiled.state),
            messages=sum(message.count for message in sent),
            message_bytes=sum(message.count * message.bytes for message in sent),
            lower_seconds=compiled.lower_seconds,
            compile_seconds=compiled.compile_seconds,
        )
