"""What the host reads of a dispatch: one integer array, a row for each slot."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

SCALARS = ("counts", "finished", "failed", "nodes", "exchanges", "overflows", "overflowed")
"""What the host reads of each slot in one number; see `Snapshot`."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Where things stand in the one integer array that a dispatch hands to the host, a row for each slot.

    One array is one message and one copy. Numbers that are no integers travel as their bits.
    """

    width: int
    """Tokens that a dispatch can emit for a slot."""
    steps: int
    depth: int
    top: int | None = None
    """Most likely tokens told of each token beside its log-probability; None where log-probabilities are not asked."""

    @property
    def sizes(self) -> dict[str, int]:
        """Columns of each entry, in order."""
        told = {} if self.top is None else {"logprobs": 1, "top_ids": self.top, "top_logprobs": self.top}
        scalars = dict.fromkeys(SCALARS, 1)
        by_token = {name: size * self.width for name, size in ({"tokens": 1} | told).items()}
        return scalars | {"round_tokens": self.steps, "hits": self.depth} | by_token

    def pack(self, values: dict[str, Array]) -> Int[Array, "slots columns"]:
        """The array, of entries [slots, …]; those that are missing are zeros."""
        slots = values["counts"].shape[0]

        def flat(name: str, size: int) -> Array:
            value = values.get(name)
            if value is None:
                return jnp.zeros((slots, size), jnp.int32)
            if jnp.issubdtype(value.dtype, jnp.floating):
                value = jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.int32)
            return value.astype(jnp.int32).reshape(slots, size)

        return jnp.concatenate([flat(name, size) for name, size in self.sizes.items()], axis=1)

    def unpack(self, packed: Int[np.ndarray, "slots columns"]) -> "Snapshot":
        """What the host reads."""
        ends = np.cumsum([*self.sizes.values()])
        found = dict(zip(self.sizes, np.split(packed, ends[:-1], axis=1), strict=True))
        one = {name: found.pop(name)[:, 0] for name in SCALARS}
        if self.top is not None:
            shape = (len(packed), self.width, self.top)
            found["logprobs"] = found["logprobs"].view(np.float32)
            found["top_ids"] = found["top_ids"].reshape(shape)
            found["top_logprobs"] = np.ascontiguousarray(found["top_logprobs"]).view(np.float32).reshape(shape)
        return Snapshot(**one, **found)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What the host reads of a dispatch, the same on every device."""

    counts: Int[np.ndarray, " slots"]
    """Tokens that the dispatch emitted."""
    finished: Int[np.ndarray, " slots"]
    failed: Int[np.ndarray, " slots"]
    nodes: Int[np.ndarray, " slots"]
    exchanges: Int[np.ndarray, " slots"]
    """Exchanges through bounded buffers since the state was made, in every row the same number: one for each layer,
    replica and tp rank of a step."""
    overflows: Int[np.ndarray, " slots"]
    """Those among them whose buffers did not hold their rows."""
    overflowed: Int[np.ndarray, " slots"]
    """Whether the slot's rounds ended with one that overflowed and gave nothing: it is to be run again exactly."""
    round_tokens: Int[np.ndarray, "slots steps"]
    hits: Int[np.ndarray, "slots depth"]
    tokens: Int[np.ndarray, "slots width"]
    logprobs: Float[np.ndarray, "slots width"] | None = None
    top_ids: Int[np.ndarray, "slots width top"] | None = None
    top_logprobs: Float[np.ndarray, "slots width top"] | None = None
