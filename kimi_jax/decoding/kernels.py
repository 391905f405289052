"""Which implementation each hot operation takes on a mesh, why, and whether it computes what it should."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kimi_jax.config import ModelConfig
from kimi_jax.ledger.launches import experts_shape
from kimi_jax.parallel.exchange.choice import buffer_rows, used
from kimi_jax.parallel.placement import Placement
from meshes.presets import Layout
from pallas_kernels import int4_moe, tree_attention
from pallas_kernels.operation import Choice, Device, self_check
from pallas_kernels.registry import OPERATIONS

if TYPE_CHECKING:
    from jaxlib._jax import Device as JaxDevice


@dataclasses.dataclass(frozen=True)
class Pick:
    """What serves one operation."""

    operation: str
    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation} {self.implementation}"


def picks(
    config: ModelConfig,
    placement: Placement,
    layout: Layout,
    mesh: Mesh,
    dtype: DTypeLike,
    *,
    requests: int,
    rows: int,
    capacity: int,
) -> list[Pick]:
    """For a step of `rows` rows on each of `requests` in the whole system, with caches of `capacity` positions."""
    device, dtype = Device.of(mesh.devices.flat[0]), jnp.dtype(dtype)
    local_requests = layout.group_requests(requests)
    parts = layout.cache_ranks
    device_rows = local_requests * rows
    experts = experts_shape(config, layout, placement.num_slots, device_rows)
    attention = tree_attention.Shape(
        requests=local_requests,
        rows=rows,
        heads=config.num_attention_heads // layout.tp * parts,
        positions=capacity // parts,
        kv_lora_rank=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
    )
    return [
        _pick("experts", int4_moe.OPERATION.choose(experts, dtype, device)),
        _pick("attention", tree_attention.OPERATION.choose(attention, dtype, device)),
        _exchange(config, placement, layout, device_rows),
    ]


def _pick(operation: str, choice: Choice) -> Pick:
    return Pick(operation, choice.implementation, choice.reason)


def _exchange(config: ModelConfig, placement: Placement, layout: Layout, rows: int) -> Pick:
    if layout.ep == 1:
        return Pick("exchange", "none", "one ep rank: rows are where their experts are")
    slots, top_k = placement.num_slots, config.num_experts_per_tok
    buffer = buffer_rows(rows, top_k, slots, slots // layout.expert_ranks, layout.ep)
    reason = f"{rows} rows a device, of which a buffer to one of {layout.ep} ranks takes {buffer}"
    return Pick("exchange", used(layout, rows, top_k, slots), reason)


def check(device: "JaxDevice") -> None:
    """Compares the kernels this device would use with their references on small problems.

    Raises:
      RuntimeError: a kernel differs by more than rounding; nothing may rely on it.
    """
    with jax.default_device(device):
        for operation in OPERATIONS.values():
            self_check(operation, Device.of(device))
