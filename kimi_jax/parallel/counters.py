"""What layers count while they run: rows that chose each expert, and exchanges whose buffers overflowed.

Whoever counts also says what an exchange does whose buffers may overflow, since only that one can run a step again.

Counting leaves no trace in signatures: a traced function opens `counting` around the layers and takes what they
reported. Where nothing is open, or it does not ask, nothing is computed.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from jaxtyping import Array, Bool, Int

OnOverflow = Literal["branch", "report", "exact"]
"""What an exchange does about buffers that do not hold its rows. `branch`: its ranks look, and take the exact path
together; on GPUs the host waits for each layer's answer. `report`: it goes on, with results that are worth nothing, and
whoever counts throws the step away. `exact`: it takes the exact path from the start."""


@dataclasses.dataclass
class Counted:
    """What one forward reported, in the order of its layers; to be read by the traced function that opened it."""

    wants_loads: bool = False
    on_overflow: OnOverflow = "branch"
    loads: list[Int[Array, " experts"]] = dataclasses.field(default_factory=list)
    """For each layer of experts, this device's real rows that chose each expert."""
    overflows: list[Bool[Array, ""]] = dataclasses.field(default_factory=list)
    """For each exchange with bounded buffers, whether these overflowed, the same on all of its ranks."""


_OPEN: contextvars.ContextVar[Counted | None] = contextvars.ContextVar("counted", default=None)


@contextlib.contextmanager
def counting(loads: bool = False, on_overflow: OnOverflow = "branch") -> Iterator[Counted]:
    """Collects what is reported inside; loads only where they are asked for.

    with counting(loads=True) as counted:
        ...  # all layers
    loads = jnp.stack(counted.loads)
    """
    counted = Counted(loads, on_overflow)
    token = _OPEN.set(counted)
    try:
        yield counted
    finally:
        _OPEN.reset(token)


def on_overflow() -> OnOverflow:
    """What an exchange has to do about an overflow; outside `counting` it decides by itself."""
    counted = _OPEN.get()
    return "branch" if counted is None else counted.on_overflow


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
