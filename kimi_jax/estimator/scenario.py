"""What is estimated: a layout on a machine, a load, and the assumptions about drafter, routing and kernels."""

from dataclasses import dataclass, field
from typing import Any

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.estimator import acceptance as acceptance_module
from kimi_jax.estimator.acceptance import Acceptance
from kimi_jax.estimator.kernels import Kernels, kernels
from kimi_jax.ledger import routing as routing_module
from kimi_jax.ledger.constants import LINKS, Constants, LinkConstants
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.ledger.precision import STORED, Precision
from kimi_jax.ledger.routing import Routing
from meshes import GPU, LayoutError, Preset, expert_slots

CHUNK = 2048
"""Prompt tokens that a device group runs at a time."""


@dataclass(frozen=True)
class Prefill:
    """Prompts that the same GPUs work through beside decode steps."""

    input_tokens: int
    output_tokens: int
    chunk: int = CHUNK
    """Prompt tokens of a device group that run beside a step."""


@dataclass(frozen=True)
class Scenario:
    """One layout under one load. `concurrency` is requests in flight in the whole system."""

    preset: Preset
    gpu: GPU
    kernels: Kernels
    concurrency: int
    context: int
    acceptance: Acceptance
    routing: Routing
    budget: int = 0
    """Draft nodes of a request's tree; 0 decodes without a draft."""
    overlap: float = 0.0
    """Share of communication hidden behind computation, 0 to 1."""
    hierarchical: bool = False
    """Whether all-reduces over the network are made of small messages between domains, in place of NCCL's."""
    has_eplb: bool = True
    physical_slots: int = 0
    """Expert slots of one replica; 0 for the fewest that divide."""
    prefill: Prefill | None = None
    """Prompts that come in the steady state, each as a request ends."""
    chunk: int = 0
    """Prompt tokens that each device group runs in this very step; with `concurrency` 0 nothing else."""
    chunk_context: int = 0
    """Cached tokens that such a token sees, on average."""
    model: ModelConfig = field(default_factory=k26)
    precision: Precision = STORED
    drafter: DrafterConfig = field(default_factory=kimi_drafter)
    constants: Constants = field(default_factory=Constants)
    link: LinkConstants = LINKS["NVLink 5"]
    """How collectives use the GPU's local link."""


def default_acceptance(
    block_size: int = 8, hit_rate: float | None = None, constants: Constants | None = None
) -> Acceptance:
    """Acceptance of a drafter with one mean hit rate (default: that of the Kimi K2.5 drafter's card)."""
    c = constants or Constants()
    return acceptance_module.constant(
        hit_rate or c.hit_rate,
        block_size - 1,
        sibling_share=c.sibling_share,
        unsure_rate=c.unsure_rate,
        after_sibling=c.after_sibling,
    )


def make_scenario(
    preset: Preset,
    gpu: GPU,
    *,
    concurrency: int,
    context: int,
    acceptance: Acceptance | None = None,
    kernel_library: str = "public",
    constants: Constants | None = None,
    model: ModelConfig | None = None,
    **options: Any,
) -> Scenario:
    """Make a scenario with Zipf routing and the GPU's kernels; `options` are fields of `Scenario`.

    Raises:
        LayoutError: a layout that the model's sizes refuse, or a machine that does not exist with this GPU.
        ValueError: a load that means nothing (no request, no context, overlap outside 0 to 1).
    """
    constants, model = constants or Constants(), model or k26()
    drafter = options.setdefault("drafter", kimi_drafter())
    precision = options.setdefault("precision", STORED)
    acceptance = acceptance or default_acceptance(drafter.block_size, constants=constants)
    options.setdefault(
        "routing",
        routing_module.zipf(
            model.n_routed_experts, model.num_experts_per_tok, constants.zipf_offset, constants.tree_diversity
        ),
    )
    result = Scenario(
        preset=preset, gpu=gpu, kernels=kernels(kernel_library, gpu.name, precision.expert_format),
        concurrency=concurrency, context=context, acceptance=acceptance, constants=constants, model=model,
        link=LINKS[gpu.local_link.name], **options,
    )  # fmt: skip
    validate(result)
    return result


def validate(s: Scenario) -> None:
    """Refuse what cannot be built or means nothing; see `make_scenario` for what is raised."""
    from kimi_jax.ledger import layout_rules  # imports jax, for which `--help` should not wait

    s.preset.check_gpu(s.gpu.name)
    layout_rules.check(s.model, s.preset.layout)
    if s.budget and s.acceptance.max_depth != s.drafter.block_size - 1:
        raise ValueError(
            f"hit rates for {s.acceptance.max_depth} draft positions, but a block of {s.drafter.block_size} "
            f"has {s.drafter.block_size - 1}"
        )
    lowest = {"concurrency": 0 if s.chunk else 1, "context": 1, "budget": 0, "chunk": 0, "chunk_context": 0}
    for name, least in lowest.items():
        value = getattr(s, name)
        if value < least:
            raise ValueError(f"{name} is {value}: at least {least}")
    if not 0 <= s.overlap <= 1:
        raise ValueError(f"overlap is {s.overlap}: a share between 0 and 1")
    if s.physical_slots and (
        s.physical_slots % s.preset.layout.expert_ranks or s.physical_slots < s.model.n_routed_experts
    ):
        ranks, experts = s.preset.layout.expert_ranks, s.model.n_routed_experts
        fewest = expert_slots(experts, ranks)
        raise LayoutError(
            f"{s.physical_slots} expert slots do not lie evenly on {ranks} ranks or do not hold {experts} experts: "
            f"use {fewest}, {fewest + ranks} or another multiple of {ranks}"
            + ("" if experts % ranks else f" (or {experts}, without replicas)")
        )
