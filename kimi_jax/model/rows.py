"""What a forward runs: groups of rows behind cached prefixes. One may be draft trees, another chunks of text."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of tokens behind the cached prefixes of some requests."""

    tokens: Int[Array, "requests rows"]
    positions: Int[Array, "requests rows"]
    ancestors: Bool[Array, "requests rows rows"]
    """`ancestors[b, i, j]`: row i of request b sees row j. A real row sees itself; a padding row sees nothing."""
    lengths: Int[Array, " requests"]
    """Cached positions of each request, all seen by all of its real rows."""
    pages: Int[Array, "requests tiles"]
    """Pages that hold them, in order; entries behind the last one that a length needs are arbitrary."""
    embeddings: Float[Array, "requests rows hidden"] | None = None
    """Added to the tokens' own: rows of images, whose tokens are beyond the vocabulary and have none; else zeros."""

    @property
    def valid(self) -> Bool[Array, "requests rows"]:
        """Which rows are real."""
        return jnp.diagonal(self.ancestors, axis1=1, axis2=2)


def causal_rows(
    tokens: Int[Array, "requests rows"],
    lengths: Int[Array, " requests"],
    counts: Int[Array, " requests"],
    pages: Int[Array, "requests tiles"] | None = None,
    embeddings: Float[Array, "requests rows hidden"] | None = None,
) -> Rows:
    """A chunk of text: row i sees rows 0..i; the first `counts` rows of each request are real.

    Without pages nothing is cached, and the lengths are zeros.
    """
    index = jnp.arange(tokens.shape[1])
    real = index < counts[:, None]
    ancestors = (index[:, None] >= index) & real[:, :, None]
    pages = _no_pages(tokens) if pages is None else pages
    return Rows(tokens, lengths[:, None] + index, ancestors, lengths, pages, embeddings)


def uncached_rows(
    tokens: Int[Array, "requests rows"],
    positions: Int[Array, "requests rows"],
    ancestors: Bool[Array, "requests rows rows"],
) -> Rows:
    """Rows with nothing cached before them."""
    return Rows(tokens, positions, ancestors, jnp.zeros(tokens.shape[0], jnp.int32), _no_pages(tokens))


def _no_pages(tokens: Int[Array, "requests rows"]) -> Int[Array, "requests 0"]:
    return jnp.zeros((tokens.shape[0], 0), jnp.int32)


def join(parts: Sequence[Shaped[Array, "requests rows *rest"]]) -> Shaped[Array, "all_rows *rest"]:
    """The rows of all groups along one axis."""
    flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


def split(x: Shaped[Array, "all_rows *rest"], groups: Sequence[Rows]) -> list[Shaped[Array, "requests rows *rest"]]:
    """The rows of each group: the reverse of `join`."""
    parts, first = [], 0
    for rows in groups:
        parts.append(x[first : first + rows.tokens.size].reshape(*rows.tokens.shape, *x.shape[1:]))
        first += rows.tokens.size
    return parts
