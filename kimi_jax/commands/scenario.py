"""What every estimate is asked for: the load, the machine, the layout."""

import dataclasses
from typing import Literal

from kimi_jax.commands.options import (
    NVL72,
    Batch,
    Config,
    Count,
    DrafterConfigFile,
    Gpu,
    Json,
    LayoutOptions,
    OptionalFile,
    Wide,
)
from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.estimator import acceptance, search
from kimi_jax.estimator.scenario import CHUNK, Prefill, Scenario, default_acceptance, make_scenario
from kimi_jax.ledger import routing
from kimi_jax.ledger.constants import Constants
from kimi_jax.ledger.models import k26, kimi_drafter, shapes_of
from kimi_jax.ledger.precision import PRECISIONS
from meshes import GPU, Preset, gpu
from meshes.hardware import INFINIBAND_400, INFINIBAND_800


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The load, the model and its drafter, and what the estimate assumes."""

    checkpoint: Config = None
    drafter: DrafterConfigFile = None
    batch: Batch = 1
    """Requests in flight in the whole machine."""
    context: int = 8192
    """Tokens in each request's cache."""
    block: Count = None
    """Positions of one drafter pass, in place of the drafter's own; the public Kimi drafters have 8."""
    hit_rate: float | None = None
    """Mean hit rate of the drafter's first candidate; by default that of the Kimi K2.5 drafter's card."""
    hit_rates: OptionalFile = None
    """Measured hit rates by position: decode.py's --json output of a run with a chain, or JSON with `hit_rates`."""
    experts_used: Literal["zipf", "uniform"] = "zipf"
    """How popular experts are."""
    expert_counts: OptionalFile = None
    """Measured popularity instead: JSON with a pick count for each expert, or such a list for each layer."""
    kernels: Literal["public", "program", "target", "vllm"] = "public"
    """Kernels: the best that were measured publicly, those with this program's launches and exchanges, this project's
    design targets, or vLLM's."""
    tree_diversity: float | None = None
    """Share of a tree's rows that choose experts as if on their own; 1, an upper bound, by default. The bundled small
    model has 0.48 (docs/small_model.md)."""
    precision: Literal["int4", "fp8", "nvfp4", "bf16"] = "int4"
    """Of the weights: routed experts in INT4 or NVFP4 and all else in bfloat16, or all in FP8 or bfloat16."""
    kv: Literal["bf16", "fp8"] = "bf16"
    """Of the latent cache."""
    overlap: float = 0.0
    """Share of communication hidden behind computation, 0 to 1."""
    eplb: bool = True
    """Experts balanced over ranks by load."""
    slots: int = 0
    """Expert slots of one replica, more than the experts for replicas; 0 for the fewest that divide."""
    input_tokens: int = 0
    """Prompt length, to count prompts that the same GPUs work through; 0 leaves them out."""
    output_tokens: int = 1024
    """Answer length, for the same purpose."""
    chunk: int = CHUNK
    """Prompt tokens that a device group runs beside a step."""
    infiniband: Literal[400, 800] | None = None
    """Gb/s of each GPU's adapter; by default the GPU's usual one."""
    wide: Wide = False
    json: Json = False

    def card(self, machine: Preset, name: str | None) -> GPU:
        """The GPU by name, or the machine's first."""
        found = gpu(name or machine.gpu_names[0])
        links = {None: found.network_link, 400: INFINIBAND_400, 800: INFINIBAND_800}
        return dataclasses.replace(found, network_link=links[self.infiniband])

    def scenario(self, machine: Preset, gpu_name: str | None, budget: int = 0) -> Scenario:
        """The scenario on a machine."""
        constants, model = Constants(), self.model()
        if self.tree_diversity is not None:
            if not 0 < self.tree_diversity <= 1:
                raise ValueError(
                    f"--tree-diversity is {self.tree_diversity:g}: a share of the rows, above 0 and at most 1"
                )
            constants = dataclasses.replace(constants, tree_diversity=self.tree_diversity)
        precision = PRECISIONS[self.precision]
        if self.kv == "fp8":
            precision = dataclasses.replace(precision, cache_bytes=1)
        sizes = model.n_routed_experts, model.num_experts_per_tok
        if self.expert_counts:
            popularity = routing.from_file(self.expert_counts, *sizes, constants.tree_diversity)
        elif self.experts_used == "uniform":
            popularity = routing.uniform(*sizes, constants.tree_diversity)
        else:
            popularity = routing.zipf(*sizes, constants.zipf_offset, constants.tree_diversity)
        drafter = self.drafter_for(model)
        if self.block is not None:
            drafter = dataclasses.replace(drafter, block_size=self.block)
        if self.hit_rates:
            rates = acceptance.from_file(
                self.hit_rates, sibling_share=constants.sibling_share, after_sibling=constants.after_sibling
            )
        else:
            rates = default_acceptance(drafter.block_size, self.hit_rate)
        return make_scenario(
            machine, self.card(machine, gpu_name), concurrency=self.batch, context=self.context, budget=budget,
            model=model, drafter=dataclasses.replace(drafter, block_size=rates.max_depth + 1), acceptance=rates,
            routing=popularity, kernel_library=self.kernels, overlap=self.overlap, has_eplb=self.eplb,
            physical_slots=self.slots, precision=precision, constants=constants,
            prefill=Prefill(self.input_tokens, self.output_tokens, self.chunk) if self.input_tokens else None,
        )  # fmt: skip

    def model(self) -> ModelConfig:
        """The model that is estimated.

        Raises:
          ConfigError: for a configuration that is none of the family's.
        """
        return k26() if self.checkpoint is None else shapes_of(self.checkpoint)

    def drafter_for(self, model: ModelConfig) -> DrafterConfig:
        """The drafter that is estimated: without --drafter one of the public Kimi drafters' shape, made for the model.

        Raises:
            ConfigError: a drafter that was made for another model.
        """
        if self.drafter is not None:
            found = DrafterConfig.from_json(self.drafter)
            found.check(model, self.drafter)
            return found
        return dataclasses.replace(kimi_drafter(), hidden_size=model.hidden_size, vocab_size=model.vocab_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Load):
    """One machine, and the layout on it."""

    layout: LayoutOptions = NVL72
    gpu: Gpu = None

    def fixed(self) -> search.Fixed:
        """What the layout options leave no choice about in a search."""
        given = self.layout
        exchange = None if given.exchange == "auto" else given.exchange
        return search.Fixed(given.dp, given.ep, given.tp, given.experts, exchange)
