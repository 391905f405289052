"""Compiles a case in a process of its own, where a kernel that cannot be assembled ends no test run.

    python tests/profiling/compiled.py hgx-ib-16 h200 round 6 2 reduced OUTPUT

writes a pickled `Compiled`. `reduced` keeps the head and latent sizes that kernels need and shrinks all else.
"""

import dataclasses
import pickle
import sys
from pathlib import Path

from kimi_jax.config import ModelConfig
from kimi_jax.drafter.config import DrafterConfig
from kimi_jax.ledger.models import k26, kimi_drafter
from kimi_jax.profiling.case import Case, Program, with_layers
from kimi_jax.profiling.compile import compile_program
from meshes.presets import preset


def reduced(config: ModelConfig, drafter: DrafterConfig) -> tuple[ModelConfig, DrafterConfig]:
    config = dataclasses.replace(
        config, hidden_size=512, vocab_size=4096, intermediate_size=1024, moe_intermediate_size=256,
        n_routed_experts=16, q_lora_rank=256, num_attention_heads=16,
    )  # fmt: skip
    drafter = dataclasses.replace(
        drafter, hidden_size=512, vocab_size=4096, intermediate_size=1024, num_hidden_layers=1,
        num_attention_heads=16, mask_token_id=4000,
    )  # fmt: skip
    return config, drafter


def case_of(mesh: str, gpu: str, program: Program, budget: int, layers: int, size: str) -> Case:
    config, drafter = with_layers(k26(), kimi_drafter(), layers)
    if size == "reduced":
        config, drafter = reduced(config, drafter)
    # A cache of 1 MiB and more a layer even where all else is small: its copy would be seen.
    context, chunk = (2048, 32) if size == "reduced" else (8192, 512)
    machine = preset(mesh)
    # What a machine of this kind should run, of whatever size the model is: buffers inside a domain, levels across two.
    exchange = "hierarchical" if machine.span("ep").domains > 1 else "alltoall"
    machine = machine.with_layout(dataclasses.replace(machine.layout, exchange=exchange))
    return Case(config, machine, gpu, 64, context, budget, drafter if budget else None, program, chunk)


if __name__ == "__main__":
    mesh, gpu, program, budget, layers, size, output = sys.argv[1:]
    assert program in ("round", "decode", "prefill")
    case = case_of(mesh, gpu, program, int(budget), int(layers), size)
    Path(output).write_bytes(pickle.dumps(compile_program(case)))
