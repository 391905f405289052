"""One public function for MLA tree attention, which picks an implementation and says what it picked and why."""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.operation import Device, Operation, Tolerance
from pallas_kernels.tree_attention import reference, selection
from pallas_kernels.tree_attention.shapes import CASES, CHECKS, SCALE, SHAPES, Shape, necessary, problem

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu


def tree_attention(
    q_latent: Float[Array, "requests rows heads kv_lora_rank"],
    q_rope: Float[Array, "requests rows heads rope"],
    cache_latent: Float[Array, "requests positions kv_lora_rank"],
    cache_rope: Float[Array, "requests positions rope"],
    lengths: Int[Array, " requests"],
    row_latent: Float[Array, "requests rows kv_lora_rank"],
    row_rope: Float[Array, "requests rows rope"],
    ancestors: Bool[Array, "requests rows rows"],
    *,
    scale: float,
    valid: Bool[Array, "requests rows"] | None = None,
    implementation: str = "auto",
    device: Device | None = None,
    interpret: "plgpu.InterpretGPUParams | None" = None,
) -> tuple[Float[Array, "requests rows heads kv_lora_rank"], Float[Array, "requests rows heads"]]:
    """Attend from the rows of a draft tree to a cached latent prefix and to their own ancestors (absorbed MLA).

    Row i of a request sees cached positions `0 .. lengths[request] - 1`, and row j of the same request wherever
    `ancestors[request, i, j]`; a valid row sees itself, and a row that is False throughout is padding. `valid` says
    instead which rows are not padding: a shard of the context that does not hold the rows' own keys passes an
    all-False mask with it. A score is `scale` times the sum of the latent and the rope dot products; the value of a
    position is its latent.

    Returns the attention-weighted latents in the queries' dtype, and the natural log-sum-exp of the scores in
    float32, with which parts of a context may be joined (`merge`). Padding rows give 0 and −inf. The softmax is
    float32; bfloat16 inputs are accumulated in float32, float32 inputs are computed in float32 throughout.

    Call it on local shapes: under a mesh with more than one device, inside `shard_map` (with `check_vma=False`, as
    Mosaic's kernels ask), with requests and heads sharded and the rest whole. `OPERATION.choose` tells beforehand
    which implementation "auto" takes on a device (default: the mesh's in use, else the first), and why. A kernel needs
    finite values past the length (zero-initialise the cache); the reference does not. `interpret` runs it on a CPU.

    Raises ValueError where shapes do not fit together, or where a named implementation cannot serve them.
    """
    check_shapes(q_latent, q_rope, cache_latent, cache_rope, lengths, row_latent, row_rope, ancestors)
    requests, rows, heads, rank = q_latent.shape
    shape = Shape(requests, rows, heads, cache_latent.shape[1], kv_lora_rank=rank, rope=q_rope.shape[-1])
    dtype = jnp.result_type(q_latent, q_rope, cache_latent, cache_rope, row_latent, row_rope)
    choice = OPERATION.choose(shape, dtype, device or Device.current(), implementation)
    arrays = (q_latent, q_rope, cache_latent, cache_rope, lengths, row_latent, row_rope, ancestors)
    return OPERATION.run(choice, *arrays, scale=scale, valid=valid, interpret=interpret)


def check_shapes(q_latent, q_rope, cache_latent, cache_rope, lengths, row_latent, row_rope, ancestors) -> None:
    """Raise a ValueError that names the first argument whose shape does not fit the others."""
    if q_latent.ndim != 4 or cache_latent.ndim != 3:
        raise ValueError(
            "q_latent must be [requests, rows, heads, kv_lora_rank] and cache_latent [requests, positions, "
            f"kv_lora_rank]; got {q_latent.shape} and {cache_latent.shape}"
        )
    requests, rows, heads, rank = q_latent.shape
    positions, rope = cache_latent.shape[1], q_rope.shape[-1]
    expected = {
        "q_rope": (q_rope, (requests, rows, heads, rope)),
        "cache_latent": (cache_latent, (requests, positions, rank)),
        "cache_rope": (cache_rope, (requests, positions, rope)),
        "lengths": (lengths, (requests,)),
        "row_latent": (row_latent, (requests, rows, rank)),
        "row_rope": (row_rope, (requests, rows, rope)),
        "ancestors": (ancestors, (requests, rows, rows)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but with q_latent {q_latent.shape} it must be {shape}")
    if ancestors.dtype != bool:
        raise ValueError(f"ancestors must be boolean, got {ancestors.dtype}: compare with != 0 first")


def _reference(*arrays: Array, scale: float = SCALE, valid: Array | None = None) -> tuple[Array, Array]:
    return reference.tree_attention(*arrays, scale=scale, valid=valid)


OPERATION = Operation(
    name="tree_attention",
    reference=_reference,
    implementations=selection.IMPLEMENTATIONS,
    prefer=selection.prefer,
    describe=selection.describe,
    problem=problem,
    # Probabilities and outputs are rounded to bfloat16, 1.1e-3 root mean square at most each; measured 1e-3 to 2.6e-3.
    # Scores and sums are float32, with approximate exp2 and log2: measured 6e-7, with sharp scores of hundreds 4e-5. A
    # tile lost of 32,768 positions moves the log-sum-exp by 2e-3.
    tolerances=(Tolerance(frobenius=4e-3, largest=2**-5), Tolerance(absolute=2e-4)),
    necessary=necessary,
    read_in_place=(2, 3),
    shapes=SHAPES,
    cases=CASES,
    checks=CHECKS,
)
