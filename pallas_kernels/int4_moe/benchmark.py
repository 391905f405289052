"""What the INT4 mixture of experts is timed on and against; `scripts/benchmark.py kernels` runs it."""

import functools
import importlib
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.int4_moe.api import int4_moe
from pallas_kernels.int4_moe.plan import Shape, Target, plan
from pallas_kernels.int4_moe.reference import dequantize, int4_moe_reference
from pallas_kernels.int4_moe.shapes import SHAPES
from pallas_kernels.timing import Case

TIMED = [name for name in SHAPES if not name.startswith(("ep-8-", "ep-12-", "ep-24-", "tp-2-", "tp-4-", "tp-16-"))]
"""The ends of the range and what one rank of 8 and 64 holds."""
SMALL = {"few rows": Shape(7, 2, 3, 256, 256, 8), "many rows": Shape(33, 2, 3, 256, 256, 3)}
"""For the interpreter: the warp engine and the tensor-core engine."""
WEIGHT_SETS = 8
WEIGHT_BYTES = 48e9  # at most, over all sets
UNPACKED_BYTES = 24e9  # the most that one set may take in bfloat16


def expert_bytes(shape: Shape) -> float:
    """Bytes of one expert's local weights and scales: 4.5 bits a weight."""
    return 3 * shape.hidden * shape.width * (0.5 + 2 / 32)


def weights(shape: Shape, key: jax.Array) -> list[jax.Array]:
    """One set of weights with random codes."""
    out = []
    for a, b in ((shape.width, shape.hidden), (shape.width, shape.hidden), (shape.hidden, shape.width)):
        key, first, second = jax.random.split(key, 3)
        out.append(jax.random.bits(first, (shape.slots, a, b // 8), jnp.uint32).view(jnp.int32))
        out.append(jax.random.uniform(second, (shape.slots, a, b // 32), jnp.bfloat16, 0.005, 0.02))
    return out


def routing(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Slot ids of a rank that holds the first `slots` experts; the others are foreign."""
    return np.stack([rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(shape.rows)]).astype(np.int32)


Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Rows sorted by group, a matrix for each group, rows of each group, to the products."""


def tokamax_ragged_dot() -> Product | None:
    """tokamax's kernel for the card, where it is installed; it is no dependency."""
    if importlib.util.find_spec("tokamax") is None:
        return None
    return importlib.import_module("tokamax").ragged_dot


def _unpacked(operands: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [dequantize(operands[i], operands[i + 1]).astype(jnp.bfloat16) for i in (0, 2, 4)]


def ragged_dot(
    x: jax.Array, ids: jax.Array, router: jax.Array, *operands: jax.Array, product: Product = jax.lax.ragged_dot
) -> jax.Array:
    """What jax offers: dequantise everything, sort the pairs by expert, three ragged products."""
    gate, up, down = (w.swapaxes(1, 2) for w in _unpacked(operands))
    slots, top_k = gate.shape[0], ids.shape[1]
    flat = jnp.where((ids >= 0) & (ids < slots), ids, slots).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(slots), 0, dtype=jnp.int32)
    a = x[order // top_k]
    h = jax.nn.silu(product(a, gate, sizes)) * product(a, up, sizes)
    y = product(h, down, sizes).astype(jnp.float32)
    weight = jnp.where(flat < slots, router.reshape(-1), 0.0)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[order // top_k].add(jnp.where(weight != 0, y, 0) * weight)


def einsum(x: jax.Array, ids: jax.Array, router: jax.Array, *operands: jax.Array) -> jax.Array:
    """The simplest form: dequantise everything, every row through every local expert, keep what was chosen."""
    gate, up, down = _unpacked(operands)
    chosen = ids[..., None] == jnp.arange(gate.shape[0])
    weight = jnp.sum(jnp.where(chosen, router[..., None], 0.0), axis=1)
    h = jax.nn.silu(jnp.einsum("rk,snk->srn", x, gate)) * jnp.einsum("rk,snk->srn", x, up)
    y = jnp.einsum("srn,skn->srk", h, down).astype(jnp.float32)
    return jnp.einsum("srk,rs->rk", y, weight)


def case(name: str, shape: Shape, target: Target, *, interpret: bool = False, sets: int = WEIGHT_SETS) -> Case:
    """One shape: what "auto" takes for `target`, the reference, and two forms of plain jax."""
    rng = np.random.default_rng(0)
    set_bytes = shape.slots * expert_bytes(shape)
    count = max(1, min(sets, int(WEIGHT_BYTES // set_bytes)))
    router = jnp.full((shape.rows, shape.top_k), 1 / shape.top_k, jnp.float32)
    ids = [routing(shape, rng) for _ in range(count)]
    active = [np.unique(i[i < shape.slots]).size for i in ids]
    chosen = plan(shape, jnp.bfloat16, target)
    kernel = functools.partial(int4_moe, num_experts=shape.num_experts, target=target, interpret=interpret)
    fits = set_bytes / 4.5 * 16 < UNPACKED_BYTES
    tokamax = tokamax_ragged_dot()
    too_large = f"its weights would take {set_bytes / 4.5 * 16 / 1e9:.0f} GB in bfloat16"
    calls: dict[str, Callable[..., jax.Array] | str] = {
        "auto": kernel,
        "reference": int4_moe_reference,
        "dequantise + ragged_dot": ragged_dot if fits else too_large,
        "dequantise + tokamax": (
            "tokamax is not installed: uv run --with tokamax …"
            if tokamax is None
            else functools.partial(ragged_dot, product=tokamax)
            if fits
            else too_large
        ),
        "dequantise + einsum": einsum if fits else too_large,
    }
    pairs = float(np.mean([(i < shape.slots).sum() for i in ids]))
    return Case(
        operation="int4_moe",
        shape=name,
        chosen=f"{chosen.implementation}: {chosen.reason}",
        least_bytes=float(np.mean(active)) * expert_bytes(shape),
        operations=2 * 3 * shape.hidden * shape.width * pairs,
        x=jax.random.normal(jax.random.key(99), (shape.rows, shape.hidden), jnp.bfloat16),
        sets=[(jnp.asarray(i), router, *weights(shape, jax.random.key(n))) for n, i in enumerate(ids)],
        calls=calls,
        exact=int4_moe_reference,
    )
