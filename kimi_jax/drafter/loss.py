"""The loss of a block drafter: cross-entropy by position in the block, early positions counting most.

A drafted token is of use only when all before it were accepted. DFlash therefore weighs position k by
exp(-(k - 1)/γ); D-PACE (arXiv 2605.18810) weighs it by what it adds to the expected accepted length under the
drafter's own current probabilities.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class DraftLoss:
    """Which weights the positions of a block get."""

    kind: Literal["decay", "d-pace"] = "decay"
    gamma: float = 4.0
    """Positions over which a decaying weight falls by e: 4 for blocks of 8, 7 for blocks of 16."""
    alpha: float = 0.5
    """D-PACE: floor of a position's survival, (1 - alpha) q + alpha."""

    def __post_init__(self) -> None:
        if self.kind not in ("decay", "d-pace"):
            raise ValueError(f"kind is {self.kind!r}; choose 'decay' or 'd-pace'")
        if not self.gamma > 0:
            raise ValueError(f"gamma is {self.gamma}; it must be positive")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must lie in [0, 1]")

    def weights(
        self, cross_entropy: Float[Array, "*blocks depth"], mask: Bool[Array, "*blocks depth"]
    ) -> Float[Array, "*blocks depth"]:
        """Weight of each position, constants to the gradient; 0 where the mask is false."""
        if self.kind == "decay":
            return jnp.exp(-jnp.arange(cross_entropy.shape[-1]) / self.gamma) * mask
        survival = (1 - self.alpha) * jnp.exp(-cross_entropy) + self.alpha
        prefix = jnp.cumprod(survival, axis=-1) * mask
        suffix = jnp.flip(jnp.cumsum(jnp.flip(prefix, -1), axis=-1), -1)
        return jax.lax.stop_gradient(suffix * mask)

    def __call__(
        self,
        logits: Float[Array, "*blocks depth vocab"],
        labels: Int[Array, "*blocks depth"],
        mask: Bool[Array, "*blocks depth"],
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Weighted sum of cross-entropies (nats) and the sum of the weights; their quotient is the loss.

        Args:
          logits: float32, of the drafted positions 1 to block - 1.
          labels: the text's tokens at those positions.
          mask: which positions have a label; those of a text are the first ones of the block.
        """
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        cross_entropy = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        weights = self.weights(cross_entropy, mask)
        return (weights * cross_entropy).sum(), weights.sum()


def accepted_lengths(
    drafted: Int[Array, "*blocks depth"], labels: Int[Array, "*blocks depth"], remaining: Int[Array, "*blocks"]
) -> Int[Array, "*blocks"]:
    """Tokens a chain emits for each block when the labels are what the target writes: matched drafts, plus one.

    `remaining` counts the text's tokens behind the anchor, its stop token included: no round emits more.
    """
    known = jnp.arange(labels.shape[-1]) < remaining[..., None]
    matched = jnp.cumprod((drafted == labels) & known, axis=-1).sum(-1)
    return jnp.minimum(matched + 1, remaining)
