"""What layers count while they run: rows that chose each expert, and exchanges whose buffers overflowed.

Counting leaves no trace in signatures: a traced function opens `counting` around the layers and takes what they
reported. Where nothing is open, or it does not ask, nothing is computed.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator

from jaxtyping import Array, Bool, Int


@dataclasses.dataclass
class Counted:
    """What one forward reported, in the order of its layers; to be read by the traced function that opened it."""

    wants_loads: bool = False
    loads: list[Int[Array, " experts"]] = dataclasses.field(default_factory=list)
    """For each layer of experts, this device's real rows that chose each expert."""
    overflows: list[Bool[Array, ""]] = dataclasses.field(default_factory=list)
    """For each exchange with bounded buffers, whether this device's rows took the exact path instead."""


_OPEN: contextvars.ContextVar[Counted | None] = contextvars.ContextVar("counted", default=None)


@contextlib.contextmanager
def counting(loads: bool = False) -> Iterator[Counted]:
    """Collects what is reported inside; loads only where they are asked for.

    with counting(loads=True) as counted:
        ...  # all layers
    loads = jnp.stack(counted.loads)
    """
    counted = Counted(loads)
    token = _OPEN.set(counted)
    try:
        yield counted
    finally:
        _OPEN.reset(token)


def report_overflow(overflow: Bool[Array, ""]) -> None:
    """Tells `counting`, where it is open."""
    counted = _OPEN.get()
    if counted is not None:
        counted.overflows.append(overflow)


def report_loads(count: Callable[[], Int[Array, " experts"]]) -> None:
    """Tells `counting`, where it asks for loads; `count` is called only then."""
    counted = _OPEN.get()
    if counted is not None and counted.wants_loads:
        counted.loads.append(count())
