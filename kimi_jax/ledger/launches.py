"""What a step costs beside its bytes: launches, and answers that the host waits for; and what two kernels take.

The rates are fixed: a change of the program is judged by them, so that they must not move with it. They were set by an
audit of compiled programs (thunks and machine code) and published launch costs, and nothing here was timed.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp

from kimi_jax.config import ModelConfig
from kimi_jax.ledger.rates import Network, transfer
from kimi_jax.ledger.step import Step, ledger
from kimi_jax.parallel.exchange.choice import expert_rows
from meshes.hardware import GPU
from meshes.presets import Layout, Preset
from pallas_kernels import int4_moe
from pallas_kernels.operation import Device

LAUNCH_US = 1.75
"""Of a small kernel that waits for the one before it, in a CUDA graph."""
HOST_WAIT_US = 10.0
"""Copy of a predicate to the host, its answer, and the launches that begin anew."""
DENSE_SHARE = 0.82
"""Of the card's bandwidth, for kernels that XLA makes."""
FLOPS_SHARE = 0.6
"""Of the card's bfloat16 peak, for the same."""
KERNEL_SHARE = 0.92
"""Of the card's bandwidth, for Pallas kernels that nothing else holds up."""
KERNEL_US = 2.5
"""Start, first fill and drain of a Pallas kernel."""
ATTENTION_TILE_US = {"hopper": 1.68, "blackwell": 1.8}
"""Of 64 query rows on 64 cached positions, on one core."""
ATTENTION_US = 9.0
"""Start of the attention kernel, pieces of the context that end unevenly, and their join."""
STAGE_CLOCKS = {
    ("warp", "hopper"): 1250, ("warp", "blackwell"): 1270, ("hopper", "hopper"): 1785, ("blackwell", "blackwell"): 1835,
}  # fmt: skip
"""Of an expert kernel's step of 256 weight rows and 256 of k, by engine and architecture: its instructions, at 0.75 a
clock on each of a core's four schedulers, and 60 more."""
STAGE = 256


@dataclasses.dataclass(frozen=True)
class Launches:
    """What a part of one execution starts."""

    kernels: float = 0
    """On the device, also copies and the Pallas kernels."""
    collective_kernels: float = 0
    """All-reduces that are one of XLA's own kernels."""
    messages: float = 0
    """Of NCCL."""
    host_waits: float = 0
    """Choices, and loops of unknown length, whose predicates the host reads."""


def modelled(
    step: Step, machine: Preset, card: GPU, launches: Mapping[str, Launches], dense_bytes: Mapping[str, float]
) -> dict[str, float]:
    """µs of each part of a step, one after the other: what a compiled program should take, not what it must.

    Args:
      launches: by part.
      dense_bytes: of memory that the kernels of XLA move, by part: without the cached latents and the experts' weights.
    """
    network, needs = Network.of(machine, card), ledger(step)
    config, layout = step.config, step.layout
    found = {}
    for part, need in needs.items():
        own = launches.get(part, Launches())
        weights = need.work.get("weights")
        flops = 0.0 if weights is None or part == "experts" else weights.flops
        bytes_us = 1e6 * dense_bytes.get(part, 0.0) / (DENSE_SHARE * card.hbm_bytes_per_s)
        flops_us = 1e6 * flops / (FLOPS_SHARE * card.bf16_flops_per_s)
        us = max(LAUNCH_US * own.kernels, bytes_us, flops_us) + HOST_WAIT_US * own.host_waits
        for message in need.messages:
            us += message.count * transfer(network, machine.span(*message.axes), message).us
        if part == "attention":
            heads = config.num_attention_heads // layout.tp * layout.cache_ranks
            positions = -(-step.context // layout.cache_ranks)
            us += need.layers * attention_us(card, step.device_requests, step.rows * heads, positions)
        if part == "experts":
            us += need.layers * experts_us(card, experts_shape(config, layout, step.num_slots, step.device_rows))
        found[part] = us
    return found


def experts_shape(config: ModelConfig, layout: Layout, num_slots: int, device_rows: int) -> int4_moe.Shape:
    """What the experts' kernels are called with on one rank, for a step of so many rows a device."""
    top_k = config.num_experts_per_tok
    return int4_moe.Shape(
        rows=layout.ep * expert_rows(layout, device_rows, top_k, num_slots),
        top_k=top_k,
        slots=num_slots // layout.expert_ranks,
        hidden=config.hidden_size,
        width=config.moe_intermediate_size // (layout.tp if layout.experts == "width" else 1),
        num_experts=config.n_routed_experts,
        routed_rows=layout.ep * device_rows,
    )


def experts_us(card: GPU, shape: int4_moe.Shape, tile_rows: int | None = None) -> float:
    """µs of the two INT4 products of one layer as they are planned, or with such tiles; 0 where no kernel serves."""
    options = {} if tile_rows is None else {"rows": tile_rows}
    config = int4_moe.OPERATION.choose(shape, jnp.bfloat16, _device(card), options=options).config
    if config is None:
        return 0.0
    total, tiles = 0.0, shape.slots * tiles_of(shape.choices, shape.num_experts, config.gate_up.rows)
    for tile, rows, k in (
        (config.gate_up, 2 * shape.width, shape.hidden), (config.down, shape.hidden, shape.width),
    ):  # fmt: skip
        waves = tiles * math.ceil(rows / STAGE) * tile.split / config.ctas
        waves = math.ceil(waves) if waves < 3 else waves + 0.5  # the last wave is not full
        clocks = STAGE_CLOCKS[tile.engine, _device(card).architecture or ""]
        unpacking = waves * (k / STAGE / tile.split) * clocks / (1e3 * card.tensor_clock_ghz)
        packed = shape.expected_active * rows * k * 4.5 / 8
        total += max(unpacking, 1e6 * packed / (KERNEL_SHARE * card.hbm_bytes_per_s)) + KERNEL_US
    return total


def tiles_of(choices: int, experts: int, rows: int) -> float:
    """Expected tiles of `rows` rows of one expert, of so many independent choices: weights are unpacked for each."""
    mean, p = choices / experts, 1 / experts
    most = math.ceil(mean + 10 * math.sqrt(mean) + 10)
    total = 0.0
    for count in range(1, min(most, choices) + 1):
        log = math.lgamma(choices + 1) - math.lgamma(count + 1) - math.lgamma(choices - count + 1)
        total += math.ceil(count / rows) * math.exp(log + count * math.log(p) + (choices - count) * math.log1p(-p))
    return total


def attention_us(card: GPU, requests: int, query_rows: int, positions: int) -> float:
    """µs of the attention kernel in one layer, of so many rows times heads on each request's positions."""
    architecture, query_tiles = _device(card).architecture or "", math.ceil(query_rows / 64)
    if architecture == "hopper" and query_tiles > 1:
        query_tiles += query_tiles % 2  # clusters of two
    tiles = requests * query_tiles * math.ceil(positions / 64)
    return ATTENTION_US + ATTENTION_TILE_US[architecture] * tiles / card.core_count


def _device(card: GPU) -> Device:
    return Device(card.device_kind, "{}.{}".format(*card.compute_capability), card.core_count)
