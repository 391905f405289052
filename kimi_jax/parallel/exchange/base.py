"""What all exchanges share: their signature, how they say what they send, and how arrays travel in one message."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt32

from kimi_jax.parallel.collectives import all_gather, axis_index, axis_size
from kimi_jax.parallel.messages import WORD, Message
from meshes.presets import Layout

EP = ("ep",)


class LocalExperts(Protocol):
    """Rows, slots within this rank (ids outside are someone else's) and weights to the weighted sum over those slots.

    `routed_rows` are the rows that chose among all experts, where the operand is a buffer with room for more or fewer:
    tile sizes follow the rows that an expert really meets.
    """

    def __call__(
        self,
        x: Float[Array, "rows hidden"],
        slots: Int[Array, "rows top_k"],
        weights: Float[Array, "rows top_k"],
        /,
        routed_rows: int | None = None,
    ) -> Float[Array, "rows hidden"]: ...


class Exchange(Protocol):
    """Applies the routed experts to this rank's rows; the result is this tp rank's part, to be summed over tp.

    Slots lie on `expert_axes`, ranks in mesh order, `num_local` slots on each; a slot id past all of them is a padding
    row's and goes nowhere. Rows lie on ep and are the same on every tp rank, so no exchange sends anything over tp:
    the rank (e, t) serves the columns of ranks (·, t), and the parts meet in the sum over tp that ends the layer.
    """

    def __call__(
        self,
        rows: Float[Array, "rows hidden"],
        slots: Int[Array, "rows top_k"],
        weights: Float[Array, "rows top_k"],
        experts: LocalExperts,
        num_local: int,
        *,
        expert_axes: tuple[str, ...] = ("ep", "tp"),
    ) -> Float[Array, "rows hidden"]: ...


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What an exchange has to carry in one layer of a step, in plain numbers."""

    layout: Layout
    rows: int
    """Rows of one device."""
    row_bytes: float
    """Of one row on its way to an expert."""
    sum_bytes: float
    """Of one row's weighted sum on its way back."""
    top_k: int
    num_slots: int
    """Of one replica, over all its ranks."""
    share: float = 1.0
    """Row-expert pairs of the busiest rank over the mean."""

    @property
    def num_local(self) -> int:
        """Slots of one rank."""
        return self.num_slots // self.layout.expert_ranks

    @property
    def choice_bytes(self) -> int:
        """Bytes of a row's choices: an id and a weight each."""
        return 2 * WORD * self.top_k


Messages = Callable[[Traffic], Iterable[Message]]
"""What an exchange sends in one layer on more than one ep rank."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """An exchange: what it does, and what it sends. The ledger counts nothing that an exchange does not declare."""

    run: Exchange
    messages: Messages


def local_slots(
    slots: Int[Array, "rows top_k"], rank: int | Int[Array, "..."], num_local: int
) -> Int[Array, "... rows top_k"]:
    """Ids as the expert rank numbers its own slots; `num_local` for those it does not hold."""
    local = slots - rank * num_local
    return jnp.where((local >= 0) & (local < num_local), local, num_local)


def column_ranks(expert_axes: tuple[str, ...]) -> Int[Array, " ep"]:
    """Expert ranks that this device exchanges with, by their place on ep: those of its own place on tp."""
    places = jnp.arange(axis_size("ep"))
    return places * axis_size("tp") + axis_index("tp") if "tp" in expert_axes else places


def gather_together(arrays: Sequence[Array], axis: str) -> list[Array]:
    """All-gathers matrices with equal first dimensions in one message: at decode sizes latency is all it costs."""
    if axis_size(axis) == 1:
        return list(arrays)
    return unpack_columns(all_gather(pack_columns(arrays), axis), arrays)


def pack_columns(arrays: Sequence[Shaped[Array, "rows _"]]) -> UInt32[Array, "rows words"]:
    """Matrices with equal first dimensions side by side, bit for bit, as words."""
    return jnp.concatenate([_as_words(array) for array in arrays], axis=1)


def unpack_columns(words: UInt32[Array, "rows words"], like: Sequence[Array]) -> list[Array]:
    """What `pack_columns` packed, with any number of rows; types and columns as in `like`."""
    ends = np.cumsum([array.shape[1] * array.dtype.itemsize // 4 for array in like])
    parts = jnp.split(words, ends[:-1], axis=1)
    return [_from_words(part, array) for part, array in zip(parts, like, strict=True)]


def _as_words(x: Shaped[Array, "rows columns"]) -> UInt32[Array, "rows words"]:
    per_word = 4 // x.dtype.itemsize
    pairs = x if per_word == 1 else x.reshape(x.shape[0], -1, per_word)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)


def _from_words(words: UInt32[Array, "rows words"], like: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, like.dtype).reshape(words.shape[0], like.shape[1])
