"""An exchange that no program here runs: only what is due is sent, as the best public kernels do (DeepEP and others).

The estimator prices it in place of exchanges through buffers, whose padding such kernels do not send.
"""

from collections.abc import Iterator

from kimi_jax.parallel.exchange.base import Traffic
from kimi_jax.parallel.messages import Message


def messages(traffic: Traffic) -> Iterator[Message]:
    """Each row to the ranks of its experts and back, one tp rank sending its share; the busiest rank's rows count."""
    layout = traffic.layout
    rows = traffic.rows / (layout.tp if "tp" in layout.expert_axes else 1) * traffic.share
    yield Message("rows to experts", "dispatch", layout.expert_axes, rows * traffic.row_bytes, copies=traffic.top_k)
    yield Message("sums back", "combine", layout.expert_axes, rows * traffic.sum_bytes, copies=traffic.top_k)
