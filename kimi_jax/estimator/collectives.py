"""Time and bytes of the collectives of a step: all-reduce by algorithm, and carrying rows to experts and back.

Times are µs for one call. Bytes are what one GPU sends one way, at the least the algorithm allows.
"""

import math
from dataclasses import dataclass

from kimi_jax.estimator.constants import Constants, LinkConstants
from meshes import GPU, AxisSpan, Topology


@dataclass(frozen=True)
class Transfer:
    """One collective: its time, the part of it that is latency, and the bytes on each kind of link."""

    us: float = 0.0
    latency_us: float = 0.0
    local_bytes: float = 0.0
    network_bytes: float = 0.0
    algorithm: str = "none"

    def __add__(self, other: "Transfer") -> "Transfer":
        return Transfer(
            self.us + other.us,
            self.latency_us + other.latency_us,
            self.local_bytes + other.local_bytes,
            self.network_bytes + other.network_bytes,
            self.algorithm if self.algorithm == other.algorithm else f"{self.algorithm} + {other.algorithm}",
        )

    def times(self, count: float) -> "Transfer":
        """So many of them, one after the other."""
        return Transfer(
            count * self.us, count * self.latency_us, count * self.local_bytes, count * self.network_bytes,
            self.algorithm,
        )  # fmt: skip


@dataclass(frozen=True)
class Network:
    """What a collective runs on."""

    gpu: GPU
    topology: Topology
    constants: Constants
    link: LinkConstants

    @property
    def local(self) -> float:
        """Local link, bytes per µs one way."""
        return self.gpu.local_link.bytes_per_s / 1e6

    @property
    def remote(self) -> float:
        """Network link of one GPU, bytes per µs one way."""
        return self.gpu.network_link.bytes_per_s / 1e6

    def hops_us(self, size: int) -> float:
        """Added latency of a group that spans several nodes of one domain."""
        nodes = max(1.0, size / self.topology.gpus_per_node)
        return self.constants.domain_hop_us * math.log2(nodes)


def _transfer(latency_us: float, local_us: float, local_bytes: float, algorithm: str) -> Transfer:
    return Transfer(latency_us + local_us, latency_us, local_bytes, 0.0, algorithm)


def all_reduce_algorithms(network: Network, size: int, num_bytes: float) -> list[Transfer]:
    """All-reduce of `num_bytes` on each of `size` GPUs of one domain, by every algorithm that applies."""
    link, c, beta = network.link, network.constants, network.local
    hop, least = network.hops_us(size), num_bytes * (size - 1) / size
    one_shot = (size - 1) * num_bytes / (link.one_shot_fraction * beta)
    two_shot = 2 * least / (link.two_shot_fraction * beta)
    ring = 2 * least / (c.nccl_bandwidth_fraction * beta)
    steps = 2 * (size - 1) * c.nccl_local_hop_us
    algorithms = [
        _transfer(link.one_shot_us + hop, one_shot, least, "one-shot"),
        _transfer(link.two_shot_us + hop, two_shot, least, "two-shot"),
        # Inside one domain NCCL's tree is a chain: as many steps as the ring, twice the bytes.
        _transfer(link.nccl_us + steps, ring, least, "NCCL ring"),
        _transfer(link.nccl_us + steps, 2 * num_bytes / (c.nccl_bandwidth_fraction * beta), least, "NCCL tree"),
    ]
    if network.gpu.nvlink_bytes_per_s and size > 2:
        nvls = num_bytes / (c.nvls_bandwidth_fraction * beta)
        algorithms.append(_transfer(c.nvls_us, nvls, least, "NVLS"))
    if not network.gpu.nvlink_bytes_per_s:
        # Over PCIe only rings through the host bridge apply, in NCCL's low-latency and its bulk protocol.
        steps = (size - 1) / 7
        return [
            _transfer(link.one_shot_us * steps, one_shot, least, "NCCL ring, low latency"),
            _transfer(link.two_shot_us * steps, two_shot, least, "NCCL ring"),
        ]
    return algorithms


def all_reduce(network: Network, span: AxisSpan, num_bytes: float) -> Transfer:
    """All-reduce over a group: the fastest algorithm, hierarchical where the group crosses the network.

    Hierarchical: reduce-scatter in the domain, all-reduce of the shards across domains (NCCL tree or ring), and
    all-gather in the domain.
    """
    if span.size == 1:
        return Transfer()
    inside = Transfer()
    if span.size_per_domain > 1:
        inside = min(all_reduce_algorithms(network, span.size_per_domain, num_bytes), key=lambda t: t.us)
    if span.domains == 1:
        return inside
    c, n = network.constants, span.domains
    shard = num_bytes / span.size_per_domain
    rate = c.network_bandwidth_fraction * network.remote
    tree_us = c.nccl_base_us + 2 * math.ceil(math.log2(n)) * c.nccl_tree_network_hop_us
    ring_us = c.nccl_base_us + 2 * (n - 1) * c.nccl_ring_network_hop_us
    least = shard * (n - 1) / n
    across = min(
        Transfer(tree_us + 2 * shard / rate, tree_us, 0.0, least, "tree"),
        Transfer(ring_us + 2 * least / rate, ring_us, 0.0, least, "ring"),
        key=lambda t: t.us,
    )
    total = inside + across
    return Transfer(
        total.us, total.latency_us, total.local_bytes, total.network_bytes,
        f"hierarchical ({inside.algorithm}, network {across.algorithm})",
    )  # fmt: skip


def gather_and_scatter(network: Network, span: AxisSpan, gathered_bytes: float) -> Transfer:
    """All-gather to `gathered_bytes` on every GPU of the group, and the reduce-scatter of as many bytes back."""
    if span.size == 1:
        return Transfer()
    link, c, n = network.link, network.constants, span.size
    moved = gathered_bytes * (n - 1) / n
    if span.domains == 1:
        latency = link.nccl_us + network.hops_us(n)
        one = _transfer(latency, moved / (c.nccl_bandwidth_fraction * network.local), moved, "all-gather, local")
    else:
        # Every GPU pulls what lies in other domains over its own adapter.
        remote = gathered_bytes * (1 - 1 / span.domains)
        latency = link.nccl_us + (span.domains - 1) * c.nccl_ring_network_hop_us
        us = latency + remote / (c.network_bandwidth_fraction * network.remote)
        one = Transfer(us, latency, moved - remote, remote, "all-gather, network")
    return one + one


def dispatch_and_combine(
    network: Network, span: AxisSpan, rows: float, top_k: int, hidden_size: int, dispatch_bytes: float
) -> Transfer:
    """Send `rows` rows of each GPU to the ranks of their top-k experts, and the results back in bfloat16.

    A row goes once to every expert (no merging on the way); the bytes that count for the limit are those of a
    row that goes once to each other rank, or domain, that needs it.
    """
    if span.size == 1:
        return Transfer()
    link, c, n = network.link, network.constants, span.size
    row_bytes = hidden_size * (dispatch_bytes + 2)
    copies = min(n, top_k)
    doublings = math.log2(max(n / 8, 1))
    ranks_needed = (n - 1) * (1 - (1 - 1 / n) ** top_k)
    if span.domains == 1:
        latency = link.dispatch_us + link.combine_us + c.exchange_hop_us * doublings
        fraction = link.exchange_fraction * (1 - c.exchange_bandwidth_loss * doublings)
        us = latency + rows * copies * row_bytes / (fraction * network.local)
        least = min(ranks_needed, copies) * rows * row_bytes
        return Transfer(us, latency, least, 0.0, "all-to-all, local")
    latency = c.network_dispatch_us + c.network_combine_us
    latency += c.network_exchange_hop_us * math.log2(max(n / 16, 1))
    remote = rows * copies * (1 - 1 / span.domains) * row_bytes
    us = latency + remote / (c.network_bandwidth_fraction * network.remote)
    domains_needed = (span.domains - 1) * (1 - (1 - 1 / span.domains) ** top_k)
    least = min(domains_needed, copies) * rows * row_bytes
    return Transfer(us, latency, 0.0, least, "all-to-all, network")
