"""A start-up check: the kernel that this device would use, against the reference, on a few small problems.

The interpreter proves the kernels' logic, not the silicon, the driver or the assembler that meet them. A server calls
`self_check()` once before it takes requests; it takes seconds, most of them compilation.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import reference
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.selection import Choice, choose
from pallas_kernels.tree_attention.shapes import SCALE, Shape, problem

CHECKS = (
    # One tile of query rows; contexts around a tile and none at all; cut and uncut requests.
    (Shape(6, 8, 8, 4096, (4096, 0, 1, 63, 65, 2000)), 0.5),
    # Two query tiles and more, two tiles of rows, pieces that span requests.
    (Shape(3, 65, 8, 1024, (1000, 128, 5)), 0.5),
    # Sharp softmax: every rescale path.
    (Shape(2, 17, 16, 2048, (2048, 777)), 20.0),
    # Plain decoding, one long request cut over the whole card.
    (Shape(1, 1, 64, 32768), 0.5),
)

# Probabilities and outputs are bfloat16: 2^-8 of the largest output each. Sums and scores are float32, with
# approximate exp2 and log2 (2 units in the last place) on scores of up to hundreds.
OUT_TOLERANCE = 2**-7
LSE_TOLERANCE = 2e-3


@dataclasses.dataclass(frozen=True)
class Result:
    """One problem: what served it, and the largest differences from the float32 reference."""

    shape: Shape
    choice: Choice
    out_error: float
    """Relative to the largest output."""
    lse_error: float


def self_check(**options) -> list[Result]:
    """Run the checks on the device in context; `options` go to `tree_attention` (an implementation, interpret).

    Raises RuntimeError, with the figures, where a kernel differs from the reference by more than rounding.
    """
    results = []
    for shape, query_std in CHECKS:
        arguments = problem(shape, query_std=query_std)
        got = jax.jit(lambda *a: tree_attention(*a, scale=SCALE, **options))(*arguments)
        exact = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in arguments]
        want = jax.jit(lambda *a: reference.tree_attention(*a, scale=SCALE))(*exact)
        choice = choose(
            requests=shape.requests,
            rows=shape.rows,
            heads=shape.heads,
            positions=shape.positions,
            implementation=options.get("implementation", "auto"),
        )
        result = Result(shape, choice, *_differences(got, want))
        # Written so that a NaN fails.
        if not (result.out_error <= OUT_TOLERANCE and result.lse_error <= LSE_TOLERANCE):
            raise RuntimeError(
                f"tree attention is wrong on this device: {choice.implementation} ({choice.reason}) differs from the "
                f"reference by {result.out_error:.2g} of the largest output (allowed {OUT_TOLERANCE:.2g}) and "
                f"{result.lse_error:.2g} in the log-sum-exp (allowed {LSE_TOLERANCE:.2g}) at {shape}. Serve with "
                "implementation='reference' and report the card, the driver and the jax version."
            )
        results.append(result)
    return results


def _differences(got, want) -> tuple[float, float]:
    (out, lse), (want_out, want_lse) = (tuple(np.asarray(a, np.float32) for a in pair) for pair in (got, want))
    seen = np.isfinite(want_lse)
    if (np.isfinite(lse) != seen).any():
        return float("nan"), float("nan")
    return (
        float(np.abs(out - want_out).max() / np.abs(want_out).max()),
        float(np.abs(lse[seen] - want_lse[seen]).max()),
    )
