"""Rates of messages: time and bytes of a collective by its kind, all-reduce by algorithm.

Times are µs for one call. Bytes are what one GPU sends one way, at the least the algorithm allows.
"""

import math
from dataclasses import dataclass

from kimi_jax.ledger.constants import LINKS, Constants, LinkConstants
from kimi_jax.parallel.messages import Message
from meshes import GPU, AxisSpan, Preset, Topology


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
    hierarchical: bool = False
    """Whether an all-reduce that crosses the network is made of a fast one in each domain and small messages between
    them, in place of NCCL's."""

    @classmethod
    def of(cls, machine: Preset, gpu: GPU) -> "Network":
        """The machine's, with the constants of published measurements."""
        return cls(gpu, machine.topology, Constants(), LINKS[gpu.local_link.name])

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
    """All-reduce over a group: the fastest algorithm of one domain, and NCCL's where the group crosses the network.

    With `Network.hierarchical`: reduce-scatter in the domain, all-reduce of the shards across domains (tree or ring),
    and all-gather in the domain, at the latencies of NCCL's own model.
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
    doublings = math.ceil(math.log2(n))
    least = shard * (n - 1) / n
    if not network.hierarchical:
        latency = c.nccl_network_us + 2 * (doublings - 1) * c.nccl_tree_network_hop_us
        moved = 2 * num_bytes * (1 - 1 / span.size_per_domain) / (c.nccl_bandwidth_fraction * network.local)
        local = num_bytes * (1 - 1 / span.size_per_domain)
        return Transfer(latency + moved + 2 * shard / rate, latency, local, least, "NCCL, network")
    tree_us = c.nccl_base_us + 2 * doublings * c.nccl_tree_network_hop_us
    ring_us = c.nccl_base_us + 2 * (n - 1) * c.nccl_ring_network_hop_us
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


def transfer(network: Network, span: AxisSpan, message: Message) -> Transfer:
    """One message over a group of GPUs: its time, and the bytes that it must send at least on each kind of link."""
    if span.size == 1:
        return Transfer()
    if message.kind == "all-reduce":
        return all_reduce(network, span, message.bytes)
    if message.kind in ("dispatch", "combine"):
        return _dispatch_or_combine(network, span, message)
    link, c, n = network.link, network.constants, span.size
    moved = message.bytes * (n - 1) / n
    name = "all-gather" if message.kind == "reduce-scatter" else message.kind
    if span.domains == 1:
        latency = link.nccl_us + network.hops_us(n)
        return _transfer(latency, moved / (c.nccl_bandwidth_fraction * network.local), moved, f"{name}, local")
    # Every GPU pulls what lies in other domains over its own adapter.
    remote = message.bytes * (1 - 1 / span.domains)
    latency = link.nccl_us + (span.domains - 1) * c.nccl_ring_network_hop_us
    us = latency + remote / (c.network_bandwidth_fraction * network.remote)
    return Transfer(us, latency, moved - remote, remote, f"{name}, network")


def _dispatch_or_combine(network: Network, span: AxisSpan, message: Message) -> Transfer:
    """Rows to the ranks of their experts, or their sums back.

    A row goes once to every expert (no merging on the way); the bytes that count for the limit are those of a
    row that goes once to each other rank, or domain, that needs it.
    """
    link, c, n = network.link, network.constants, span.size
    is_dispatch = message.kind == "dispatch"
    copies = min(n, message.copies)
    doublings = math.log2(max(n / 8, 1))
    if span.domains == 1:
        latency = (link.dispatch_us if is_dispatch else link.combine_us) + c.exchange_hop_us * doublings / 2
        fraction = link.exchange_fraction * (1 - c.exchange_bandwidth_loss * doublings)
        us = latency + message.bytes * copies / (fraction * network.local)
        ranks_needed = (n - 1) * (1 - (1 - 1 / n) ** message.copies)
        return Transfer(us, latency, min(ranks_needed, copies) * message.bytes, 0.0, "all-to-all, local")
    latency = c.network_dispatch_us if is_dispatch else c.network_combine_us
    latency += c.network_exchange_hop_us * math.log2(max(n / 16, 1)) / 2
    remote = message.bytes * copies * (1 - 1 / span.domains)
    us = latency + remote / (c.network_bandwidth_fraction * network.remote)
    domains_needed = (span.domains - 1) * (1 - (1 - 1 / span.domains) ** message.copies)
    return Transfer(us, latency, 0.0, min(domains_needed, copies) * message.bytes, "all-to-all, network")
