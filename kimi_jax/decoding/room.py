"""How many pages of latents fit beside an engine's weights: the memory of its devices against the ledger."""

import dataclasses
import os
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from kimi_jax.decoding.programs import Programs
from kimi_jax.ledger.constants import Constants
from kimi_jax.ledger.step import Step, cache_bytes, context_bytes
from kimi_jax.parallel import host_arrays

if TYPE_CHECKING:
    from kimi_jax.decoding.engine import Engine

CPU_SHARE = 0.5
"""Of a machine's memory that CPU devices may fill: the rest is for the system, the checkpoint's files and steps."""


def device_bytes(mesh: Mesh) -> float:
    """Bytes that this process's devices may hold each: what is left to JAX of a GPU, less what steps take."""
    devices = mesh.local_mesh.devices.flat
    if devices[0].platform == "cpu":
        return CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(devices)
    return min(device.memory_stats()["bytes_limit"] for device in devices) - Constants().reserve_bytes


def pages_that_fit(engine: "Engine", programs: Programs, shared: bool, slots: int, capacity: int) -> int:
    """Pages that each device group can have beside the weights and the slots. All processes call this together.

    Args:
      shared: whether prompts share pages.
      slots: of a device group.
      capacity: tokens of the longest request, in whole pages.

    Raises:
      ValueError: not even one page, naming how many slots would leave room.
    """
    each = page_bytes(engine, programs, shared)
    slot = slot_bytes(engine, programs, capacity)
    free = device_bytes(engine.mesh) - _held_bytes(engine)
    pages = int(host_arrays.of_process_0(max((free - slots * slot) // each, 0)))
    if pages < 1:
        most = max(int((free - each) // slot), 0) if slot else 0
        raise ValueError(
            f"{slots} slots leave no memory for a page of {programs.page_tokens} tokens ({each / 1e6:.1f} MB) beside "
            f"{_held_bytes(engine) / 1e9:.1f} GB of weights: {most} slots would"
        )
    return pages


def page_bytes(engine: "Engine", programs: Programs, shared: bool) -> float:
    """Bytes of a page on each of its devices: latents and, where prompts share pages, what the drafter keeps."""
    step, drafter = _step(engine, programs.page_tokens), engine.drafter
    if not shared or programs.speculation.context is None or drafter is None:
        return cache_bytes(step)
    return cache_bytes(step) + context_bytes(step, dataclasses.replace(drafter.config, draft_window=step.context))


def slot_bytes(engine: "Engine", programs: Programs, capacity: int) -> float:
    """Bytes that a slot has for itself on each of its devices: the drafter's context."""
    if programs.speculation.context is None or engine.drafter is None:
        return 0
    return context_bytes(_step(engine, capacity), engine.drafter.config)


def _step(engine: "Engine", context: int) -> Step:
    return Step(engine.config, engine.layout, requests=1, rows=1, context=context, dtype=engine.dtype)


def _held_bytes(engine: "Engine") -> float:
    """Bytes of weights on this process's fullest device."""
    held: dict[object, int] = {}
    for leaf in jax.tree.leaves(engine.parameters):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)
