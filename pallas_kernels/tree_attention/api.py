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
    latent: Float[Array, "number_of_pages page kv_lora_rank"],
    rope: Float[Array, "number_of_pages page rope"],
    pages: Int[Array, "requests tiles"],
    lengths: Int[Array, " requests"],
    own_latent: Float[Array, "requests rows kv_lora_rank"],
    own_rope: Float[Array, "requests rows rope"],
    ancestors: Bool[Array, "requests rows rows"],
    *,
    scale: float,
    valid: Bool[Array, "requests rows"] | None = None,
    implementation: str = "auto",
    device: Device | None = None,
    interpret: "plgpu.InterpretGPUParams | None" = None,
) -> tuple[Float[Array, "requests rows heads kv_lora_rank"], Float[Array, "requests rows heads"]]:
    """Attend from the rows of a draft tree to a cached latent prefix and to their own ancestors (absorbed MLA).

    `latent` and `rope` hold the cache in pages of any requests. `pages` names those of each request in the order of its
    positions: position p is row `p % page` of page `pages[request, p // page]`. Entries behind the last page that a
    length reaches may be anything and are not read; a table of no tiles says that nothing is cached.

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
    finite values past the length in a request's last page; the reference does not. `interpret` runs it on a CPU.

    Raises:
      ValueError: shapes do not fit together, or a named implementation cannot serve them.
    """
    check_shapes(q_latent, q_rope, latent, rope, pages, lengths, own_latent, own_rope, ancestors)
    requests, rows, heads, rank = q_latent.shape
    page = latent.shape[1]
    positions = pages.shape[1] * page
    shape = Shape(requests, rows, heads, positions, kv_lora_rank=rank, rope=q_rope.shape[-1], page=page)
    dtype = jnp.result_type(q_latent, q_rope, latent, rope, own_latent, own_rope)
    choice = OPERATION.choose(shape, dtype, device or Device.current(), implementation)
    arrays = (q_latent, q_rope, latent, rope, pages, lengths, own_latent, own_rope, ancestors)
    return OPERATION.run(choice, *arrays, scale=scale, valid=valid, interpret=interpret)


def check_shapes(q_latent, q_rope, latent, rope, pages, lengths, own_latent, own_rope, ancestors) -> None:
    """Raise a ValueError that names the first argument whose shape does not fit the others."""
    if q_latent.ndim != 4 or latent.ndim != 3 or pages.ndim != 2:
        raise ValueError(
            "q_latent must be [requests, rows, heads, kv_lora_rank], latent [number_of_pages, page, kv_lora_rank] and "
            f"pages [requests, tiles]; got {q_latent.shape}, {latent.shape} and {pages.shape}"
        )
    requests, rows, heads, rank = q_latent.shape
    width = q_rope.shape[-1]
    number_of_pages, page, _ = latent.shape
    if page == 0 or (pages.size and number_of_pages == 0):
        raise ValueError(f"latent has shape {latent.shape}: there is no page for the entries of pages {pages.shape}")
    expected = {
        "q_rope": (q_rope, (requests, rows, heads, width)),
        "latent": (latent, (number_of_pages, page, rank)),
        "rope": (rope, (number_of_pages, page, width)),
        "pages": (pages, (requests, pages.shape[1])),
        "lengths": (lengths, (requests,)),
        "own_latent": (own_latent, (requests, rows, rank)),
        "own_rope": (own_rope, (requests, rows, width)),
        "ancestors": (ancestors, (requests, rows, rows)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but with q_latent {q_latent.shape} it must be {shape}")
    if not jnp.issubdtype(pages.dtype, jnp.integer):
        raise ValueError(f"pages must be integers, got {pages.dtype}")
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
