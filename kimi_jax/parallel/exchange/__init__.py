"""How rows reach the experts they chose and come back: backends of one signature, exact, never dropping a token.

`allgather` sends every row to every expert rank. `alltoall` sends a row to the ranks it chose, through buffers sized
for the expected load, and takes the exact path of `allgather` in a step whose rows do not fit. `ragged` sends exactly
the rows that are due, on GPUs. `tensor` is for experts cut along their width, which need no exchange inside tp.
"""

from kimi_jax.parallel.exchange.all_gather import allgather
from kimi_jax.parallel.exchange.all_to_all import alltoall, auto
from kimi_jax.parallel.exchange.base import Exchange, LocalExperts, gather_together
from kimi_jax.parallel.exchange.expert_width import tensor
from kimi_jax.parallel.exchange.ragged_all_to_all import ragged

BACKENDS: dict[str, Exchange] = {
    "auto": auto,
    "allgather": allgather,
    "alltoall": alltoall,
    "ragged": ragged,
    "tensor": tensor,
}
"""By the name that a layout's field `exchange` takes. `auto` picks by the number of rows; it never picks `ragged`."""

__all__ = [
    "BACKENDS",
    "Exchange",
    "LocalExperts",
    "allgather",
    "alltoall",
    "auto",
    "gather_together",
    "ragged",
    "tensor",
]
