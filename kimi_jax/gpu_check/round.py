"""A round of K2.6's first layers with random weights."""

import functools
import re
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.decoding.generate import Limits, shape_of
from kimi_jax.decoding.kernels import picks
from kimi_jax.decoding.session import Session
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.parameters import Parameters
from kimi_jax.profiling.case import Case, with_layers
from kimi_jax.profiling.compile import Compiled, abstract_parameters, compile_for, compile_program, programs_of
from meshes.devices import build_mesh
from meshes.hardware import card_of
from meshes.presets import preset
from pallas_kernels.operation import Device

REQUESTS, CONTEXT, BUDGET = 1, 2048, 15
WARM_UP, ROUNDS = 2, 20
CODE_STD = 4.6
"""Standard deviation of a uniform code of -8 to 7."""
THUNKS = {"kCommandBuffer": "graphs", "kConditional": "conditionals", "kWhile": "loops outside graphs"}


def measure(layers: int) -> dict[str, Any]:
    """Runs rounds on this machine's first GPU; the weights of three layers and a drafter take about 32 GB.

    Returns seconds of the median round, what served the operations, counts of graphs, and whether all is finite.
    """
    card = card_of(Device.current().kind)
    case = _case(None if card is None else card.name, layers)
    mesh = build_mesh(case.preset, jax.devices())
    programs = programs_of(case, mesh)
    parameters = random_parameters(abstract_parameters(programs))
    new_tokens = (WARM_UP + ROUNDS) * (programs.speculation.max_depth + 1) + 1
    prompts = np.random.default_rng(0).integers(0, case.config.vocab_size, (REQUESTS, CONTEXT)).tolist()
    session = Session(programs, parameters, shape_of(programs, [CONTEXT] * REQUESTS, [new_tokens] * REQUESTS, Limits()))
    with tempfile.TemporaryDirectory() as dump:
        now = session.fill(prompts)
        state = jax.block_until_ready(session.state)
        compiled, program = compile_for(case, programs, (parameters, state, now), dump=Path(dump))
        times = []
        for _ in range(WARM_UP + ROUNDS):
            started = time.perf_counter()
            state = jax.block_until_ready(program(parameters, state, now))
            times.append(time.perf_counter() - started)
        finite = all(
            bool(jnp.isfinite(leaf).all())
            for leaf in jax.tree.leaves(state)
            if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 2  # the cache: a NaN anywhere reaches it
        )
        thunks = _thunks(Path(dump))
    served = picks(
        case.config, programs.model.placement, case.preset.layout, mesh, case.dtype,
        requests=REQUESTS, rows=case.rows, capacity=case.capacity,
    )  # fmt: skip
    return {
        "seconds": statistics.median(times[WARM_UP:]),
        "finite": finite,
        "thunks": thunks,
        "temporary_bytes": compiled.temporaries,
        **{pick.operation: str(pick) for pick in served},
    }


def compiled(card: str, layers: int) -> dict[str, Any]:
    """The same round for a card that is not here: its kernels, temporaries and counts of graphs."""
    with tempfile.TemporaryDirectory() as dump:
        found: Compiled = compile_program(_case(card, layers), dump=Path(dump), registers=True)
        thunks = _thunks(Path(dump))
    kernels = {kernel.name: kernel.registers for kernel in found.assembled}
    return {"kernels": kernels, "temporary_bytes": found.temporaries, "thunks": thunks}


def _case(card: str | None, layers: int) -> Case:
    config, drafter = with_layers(k26(), kimi_drafter(), layers)
    return Case(config, preset("local"), card, REQUESTS, CONTEXT, budget=BUDGET, drafter=drafter)


def random_parameters(declared: Parameters) -> Parameters:
    """Random parameters in place of abstract ones, made on the devices where they lie."""
    leaves, tree = jax.tree.flatten(declared)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            jax.jit(functools.partial(_random, leaf.shape, leaf.dtype), out_shardings=leaf.sharding)(key)
            for leaf, key in zip(leaves, keys, strict=True)
        ],
    )


def _random(shape: tuple[int, ...], dtype: jnp.dtype, key: jax.Array) -> jax.Array:
    """Values that keep activations near 1: INT4 words and their scales, matrices, and ones for norms and biases."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.bits(key, shape, jnp.uint32).view(jnp.int32)
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    if len(shape) == 3:  # scales of 32 codes each
        return jax.random.uniform(key, shape, dtype, 0.5, 1.5) / (CODE_STD * (32 * shape[-1]) ** 0.5)
    return (jax.random.normal(key, shape, dtype) / shape[-1] ** 0.5).astype(dtype)


def _thunks(dump: Path) -> dict[str, int]:
    """How often XLA's final sequence of a program has what a device must be told of separately."""
    files = sorted(dump.rglob("*thunk_sequence*"), key=lambda file: file.stat().st_size)
    if not files:
        return {}
    kinds = Counter(re.findall(r"\bk[A-Z]\w+", files[-1].read_text(errors="replace")))
    return {name: kinds[kind] for kind, name in THUNKS.items()}
