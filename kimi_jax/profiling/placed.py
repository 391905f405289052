"""The arrays of a compiled program as one device holds them, by part of the model."""

import dataclasses
import math
from collections.abc import Iterable

import jax.numpy as jnp

from kimi_jax.ledger.part import part_of
from kimi_jax.ledger.step import Program
from kimi_jax.ledger.weights import fills_context


@dataclasses.dataclass(frozen=True)
class Placed:
    """One array as a device holds it."""

    name: str
    shape: tuple[int, ...]
    """Of the device's shard."""
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the device's shard."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def weight_part(name: str) -> str:
    """The part of a weight by its dotted path.

    Raises:
      ValueError: for one of no known part.
    """
    return part_of(name.split("."))


def weight_bytes(weights: Iterable[Placed]) -> dict[str, int]:
    """Bytes that one device holds, by part."""
    totals: dict[str, int] = {}
    for array in weights:
        part = weight_part(array.name)
        totals[part] = totals.get(part, 0) + array.bytes
    return totals


def read_whole(program: Program, weights: Iterable[Placed]) -> list[Placed]:
    """The weights that a program reads whole, so not the embedding; a prefill reads a few of the drafter's."""
    found = [array for array in weights if weight_part(array.name) != "embedding"]
    if program != "prefill":
        return found
    return [a for a in found if weight_part(a.name) != "drafter" or fills_context(tuple(a.name.split(".")[1:]))]


def state_bytes(state: Iterable[Placed]) -> dict[str, int]:
    """Bytes of one device's decoding state: `cache`, the drafter's `context`, and `other`."""
    totals = {"cache": 0, "context": 0, "other": 0}
    for array in state:
        kind = array.name.split(".")[0]
        totals[kind if kind in totals else "other"] += array.bytes
    return totals
