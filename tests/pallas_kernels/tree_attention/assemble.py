"""Compile `tree_attention` for a GPU that is not there; print what XLA and ptxas report. Run by test_assembly.py.

Arguments: GPU names, a slash, names of shapes. MOSAIC_GPU_DUMP_PTXAS=1 and MOSAIC_GPU_DUMP_PTX=1 in the environment
make the kernels' own reports appear between.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.targets import target
from pallas_kernels.tree_attention import choose, tree_attention
from pallas_kernels.tree_attention.shapes import SCALE, SHAPES

TP = 2


def arguments(shape, mesh):
    """Abstract arguments of `tree_attention` in its order and their partition, with `shape` on each of TP devices."""
    queries = (shape.requests, shape.rows, TP * shape.heads)
    sizes = [
        (*queries, shape.kv_lora_rank),
        (*queries, shape.rope),
        (shape.requests, shape.positions, shape.kv_lora_rank),
        (shape.requests, shape.positions, shape.rope),
        (shape.requests,),
        (shape.requests, shape.rows, shape.kv_lora_rank),
        (shape.requests, shape.rows, shape.rope),
        (shape.requests, shape.rows, shape.rows),
    ]
    dtypes = [jnp.bfloat16] * 4 + [jnp.int32] + [jnp.bfloat16] * 2 + [jnp.bool_]
    specs = [P(None, None, "tp")] * 2 + [P()] * 6
    abstract = [
        jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
        for size, dtype, spec in zip(sizes, dtypes, specs, strict=True)
    ]
    return abstract, tuple(specs)


def main():
    cut = sys.argv.index("/")
    for gpu in sys.argv[1:cut]:
        devices = topologies.get_topology_desc(
            platform="cuda", topology_name=gpu, topology=f"1x1x{TP}", target_config=target(gpu)
        ).devices
        mesh = Mesh(np.array(devices).reshape(TP), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
        for name in sys.argv[cut + 1 :]:
            shape = SHAPES[name]
            print(f"=== {gpu} {name}", flush=True)
            with jax.set_mesh(mesh):
                abstract, specs = arguments(shape, mesh)
                call = jax.shard_map(
                    lambda *a: tree_attention(*a, scale=SCALE),
                    in_specs=specs,
                    out_specs=(P(None, None, "tp"),) * 2,
                    check_vma=False,
                )
                compiled = jax.jit(call).lower(*abstract).compile()
                choice = choose(requests=shape.requests, rows=shape.rows, heads=shape.heads, positions=shape.positions)
            text, memory = compiled.as_text(), compiled.memory_analysis()
            report = {
                "implementation": choice.implementation,
                "reason": choice.reason,
                "splits": choice.config.splits,
                "temporary_bytes": memory.temp_size_in_bytes,
                "copies": [line.strip()[:200] for line in text.splitlines() if " copy(" in line],
            }
            print("REPORT", json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
