"""How rows reach the experts they chose and come back: backends of one signature, exact, never dropping a token.

`allgather` sends every row to every expert rank, and `hierarchical` does so once for all tp ranks where a network
parts the ep ranks. `alltoall` sends a row to the ranks it chose, through buffers sized for the expected load; what
follows where rows do not fit is `counters.OnOverflow`. `ragged` sends exactly the rows that are due, on GPUs. `ideal`
runs nowhere: it says what the best public kernels send, for estimates.
"""

import functools

from kimi_jax.parallel.exchange import all_gather, all_to_all, hierarchical, ideal, ragged_all_to_all
from kimi_jax.parallel.exchange.all_gather import allgather
from kimi_jax.parallel.exchange.all_to_all import alltoall, auto
from kimi_jax.parallel.exchange.base import Backend, Exchange, LocalExperts, Messages, Traffic, gather_together
from kimi_jax.parallel.exchange.ragged_all_to_all import ragged
from meshes.presets import Layout, LayoutError

BACKENDS: dict[str, Backend] = {
    "auto": Backend(auto, all_to_all.auto_messages),
    "allgather": Backend(allgather, all_gather.messages),
    "hierarchical": Backend(hierarchical.hierarchical, hierarchical.messages),
    "alltoall": Backend(alltoall, all_to_all.messages),
    "ragged": Backend(ragged, ragged_all_to_all.messages),
}
"""By the name that a layout's field `exchange` takes. `auto` picks by the number of rows; it never picks `ragged`."""


def backend(name: str) -> Backend:
    """The exchange of a layout.

    Raises:
      LayoutError: for an unknown name, with those that are known.
    """
    if name not in BACKENDS:
        raise LayoutError(f"exchange is {name!r}: choose from {', '.join(BACKENDS)}")
    return BACKENDS[name]


def exchange_of(layout: Layout) -> Exchange:
    """What a model on a layout calls. Raises LayoutError as `backend`."""
    if layout.exchange == "auto":
        return functools.partial(auto, expert_axes=layout.expert_axes, across=layout.across)
    return functools.partial(backend(layout.exchange).run, expert_axes=layout.expert_axes)


def messages_of(name: str) -> Messages:
    """What an exchange declares, `ideal` included.

    Raises:
      LayoutError: for an unknown name.
    """
    return ideal.messages if name == "ideal" else backend(name).messages


__all__ = [
    "BACKENDS",
    "Backend",
    "Exchange",
    "LocalExperts",
    "Messages",
    "Traffic",
    "allgather",
    "alltoall",
    "auto",
    "backend",
    "exchange_of",
    "gather_together",
    "messages_of",
    "ragged",
]
