"""What DFlash 2 adds to DFlash: short convolutions around attention and MLP, and a selector of candidates.

As in the package `dflash` 0.1.0 (`GroupedDynamicCausalConv`, `CandidateSelector`).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kimi_jax.model.layers import Linear
from kimi_jax.parameters import weight


class GroupedDynamicConv(nnx.Module):
    """A causal depthwise convolution over the block, before and after a sublayer.

    Each channel's kernel is fixed, plus a part computed from the sublayer's input and shared by a group of channels.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int):
        self.base_kernel = weight((2, kernel_size, hidden_size), (None, None, None))
        groups = hidden_size // group_size
        self.kernel_projection = Linear(hidden_size, 2 * kernel_size * groups)
        self.kernel_size, self.groups = kernel_size, groups

    def prepare(
        self, x: Float[Array, "requests block hidden"]
    ) -> tuple[Float[Array, "requests block hidden"], Float[Array, "requests block taps groups"]]:
        """The sublayer's input, convolved, and the kernel for `finish`."""
        dynamic = self.kernel_projection(x).reshape(*x.shape[:-1], 2, self.kernel_size, self.groups)
        return self._convolve(x, 0, dynamic[..., 0, :, :]), dynamic[..., 1, :, :]

    def finish(
        self, x: Float[Array, "requests block hidden"], dynamic: Float[Array, "requests block taps groups"]
    ) -> Float[Array, "requests block hidden"]:
        """The sublayer's output, convolved."""
        return self._convolve(x, 1, dynamic)

    def _convolve(self, x: Array, which: int, dynamic: Array) -> Array:
        channels = x.reshape(*x.shape[:-1], self.groups, -1)
        base = self.base_kernel[...][which].reshape(self.kernel_size, self.groups, -1)
        block = x.shape[1]
        total = jnp.zeros_like(channels)
        for offset in range(self.kernel_size):
            earlier = jnp.pad(channels, ((0, 0), (offset, 0), (0, 0), (0, 0)))[:, :block]
            total = total + (base[offset] + dynamic[..., offset, :, None]) * earlier
        return total.reshape(x.shape)


class CandidateSelector(nnx.Module):
    """Scores a position's candidates given the token before: unary + ⟨A[before] ⊙ P h, B[candidate]⟩.

    The codebooks are whole on every device: a round reads a few hundred of their rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int):
        self.predecessor_codebook = weight((vocab_size, rank), (None, None))
        self.successor_codebook = weight((vocab_size, rank), (None, None))
        self.hidden_projection = Linear(hidden_size, rank)

    def __call__(
        self,
        hidden: Float[Array, "requests depth hidden"],
        unary: Float[Array, "requests depth k"],
        ids: Int[Array, "requests depth k"],
        anchor: Int[Array, " requests"],
    ) -> Float[Array, "requests depth k k"]:
        """Log-probability of candidate j at a position after candidate i at the one before (the anchor at the first).

        `unary` may be logits or log-probabilities: what is common to a position cancels.
        """
        first = jnp.broadcast_to(anchor[:, None, None], (*anchor.shape, 1, ids.shape[-1]))
        before = jnp.concatenate([first, ids[:, :-1]], axis=1)
        context = self.predecessor_codebook[...][before] * self.hidden_projection(hidden)[:, :, None]
        after = self.successor_codebook[...][ids]
        pairwise = jnp.einsum("rdik,rdjk->rdij", context, after, preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(unary.astype(jnp.float32)[:, :, None] + pairwise, axis=-1)
