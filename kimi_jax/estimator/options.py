"""What every estimate is asked for: the load, the machine, the layout. `scripts/estimate.py` takes them as options."""

import dataclasses
from pathlib import Path
from typing import Literal

from kimi_jax.estimator import acceptance, routing, search
from kimi_jax.estimator.constants import Constants
from kimi_jax.estimator.model import Drafter, k26
from kimi_jax.estimator.scenario import Prefill, Scenario, default_acceptance, make_scenario
from meshes import GPU, Preset, gpu, preset
from meshes.hardware import INFINIBAND_400, INFINIBAND_800


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load, the drafter, and what the model assumes."""

    concurrency: int = 1
    """Requests in flight in the whole system."""
    context: int = 8192
    """Tokens in each request's cache."""
    block: int = 8
    """Positions of one drafter pass; the public Kimi drafters have 8."""
    hit_rate: float | None = None
    """Mean hit rate of the drafter's first candidate; by default that of the Kimi K2.5 drafter's card."""
    hit_rates: Path | None = None
    """Measured hit rates by position: decode.py's --json output of a run with a chain, or JSON with `hit_rates`."""
    experts_used: Literal["zipf", "uniform"] = "zipf"
    """How popular experts are."""
    expert_counts: Path | None = None
    """Measured popularity instead: JSON with a pick count for each expert, or such a list for each layer."""
    kernels: Literal["public", "target", "vllm"] = "public"
    """Kernels: the best that were measured publicly, this project's design targets, or vLLM's."""
    overlap: float = 0.0
    """Share of communication hidden behind computation, 0 to 1."""
    eplb: bool = True
    """Experts balanced over ranks by load."""
    slots: int = 0
    """Expert slots of one replica, more than the experts for replicas; 0 for the fewest that divide."""
    split_cache: bool = False
    """Split the latent cache along the sequence over tp instead of repeating it on every tp rank."""
    input_tokens: int = 0
    """Prompt length, to count prompts that the same GPUs work through; 0 leaves them out."""
    output_tokens: int = 1024
    """Answer length, for the same purpose."""
    infiniband: Literal[400, 800] | None = None
    """Gb/s of each GPU's adapter; by default the GPU's usual one."""
    wide: bool = False
    """Tables with all their columns, for more than 80 columns of text."""
    json: bool = False
    """Print JSON instead of tables."""

    def card(self, machine: Preset, name: str | None) -> GPU:
        """The GPU by name, or the machine's first."""
        found = gpu(name or machine.gpu_names[0])
        links = {None: found.network_link, 400: INFINIBAND_400, 800: INFINIBAND_800}
        return dataclasses.replace(found, network_link=links[self.infiniband])

    def scenario(self, machine: Preset, gpu_name: str | None, budget: int = 0) -> Scenario:
        """The scenario on a machine."""
        constants, model = Constants(), k26()
        popularity = {
            "zipf": routing.zipf(384, 8, constants.zipf_offset, constants.tree_diversity),
            "uniform": routing.uniform(384, 8, constants.tree_diversity),
        }[self.experts_used]
        if self.expert_counts:
            popularity = routing.from_file(self.expert_counts, model.n_routed_experts, model.num_experts_per_tok)
        if self.hit_rates:
            rates = acceptance.from_file(
                self.hit_rates, sibling_share=constants.sibling_share, after_sibling=constants.after_sibling
            )
        else:
            rates = default_acceptance(self.block, self.hit_rate)
        return make_scenario(
            machine,
            self.card(machine, gpu_name),
            concurrency=self.concurrency,
            context=self.context,
            acceptance=rates,
            routing=popularity,
            kernel_library=self.kernels,
            budget=budget,
            overlap=self.overlap,
            has_eplb=self.eplb,
            physical_slots=self.slots,
            is_cache_split=self.split_cache,
            prefill=Prefill(self.input_tokens, self.output_tokens) if self.input_tokens else None,
            drafter=Drafter(block_size=rates.max_depth + 1),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Load):
    """One machine, and the layout on it."""

    mesh: str = "nvl72"
    """Machine: local (up to 8 GPUs of one node), hgx-ib-N, nvl36 or nvl72."""
    gpu: str | None = None
    """h100, h200, b200, b300, gb200, gb300 or rtx-pro-6000 (on local); by default the mesh's usual one."""
    dp: int | None = None
    """Replicas."""
    ep: int | None = None
    """Ranks that share the experts and split the batch."""
    tp: int | None = None
    """Ranks that split heads and widths."""
    experts: Literal["slots", "width"] | None = None
    """Split whole experts over ep and tp, or experts over ep and their width over tp."""
    exchange: Literal["auto", "allgather", "alltoall"] | None = None
    """How rows reach experts and come back; by default auto, which decides by the rows of a step as the decoder does. A
    search tries both."""

    def machine(self) -> Preset:
        """The preset with the layout options applied."""
        machine = preset(self.mesh).with_axes(dp=self.dp, ep=self.ep, tp=self.tp)
        chosen = {name: value for name in ("experts", "exchange") if (value := getattr(self, name))}
        return machine.with_layout(dataclasses.replace(machine.layout, **chosen))

    def fixed(self) -> search.Fixed:
        """What the layout options leave no choice about in a search."""
        exchange = None if self.exchange == "auto" else self.exchange
        return search.Fixed(self.dp, self.ep, self.tp, self.experts, exchange)
