"""What the compiler makes of the kernels for a card that need not be there: registers, spills, instructions.

    python -m pallas_kernels.int4_moe.assembly --gpu h200 --rows 64 --slots 48

Needs jax's CUDA plugin. Each call compiles in its own process: a kernel that a target cannot assemble ends it.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys

from pallas_kernels.int4_moe.plan import Implementation, Shape


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One assembled kernel: ptxas's report, and how often some opcodes stand in its PTX (not how often they run)."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    opcodes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A compiled call: its kernels in order (gather, gate and up, down, combine), and what XLA put around them.

    `copied_bytes` counts results of copies and slices in the optimised program that are as large as a weight matrix
    or its scales: 0 where the kernels read the weights in place.
    """

    kernels: tuple[Kernel, ...]
    launches: int
    temporary_bytes: int
    copied_bytes: int


_OPCODES = (
    "mma.sync.aligned.m16n8k16",
    "wgmma.mma_async",
    "tcgen05.mma",
    "tcgen05.st",
    "cp.async.bulk.tensor",
    "ldmatrix",
    "lop3.b32",
    "mbarrier.try_wait",
    "ld.global.v",
    "st.global.v",
)


def assemble(gpu: str, shapes: list[Shape], implementation: Implementation = "auto") -> list[Assembly]:
    """Compile the operation for a GPU of `meshes.targets.TARGETS` at full size, without having one.

    Raises:
        RuntimeError: the compile failed; the message is the compiler's.
    """
    request = json.dumps([gpu, implementation, [dataclasses.asdict(s) for s in shapes]])
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    command = [sys.executable, "-m", "pallas_kernels.int4_moe.assembly", "--request", request]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise RuntimeError(f"compiling for {gpu} failed ({done.returncode}):\n{text[-4000:]}")
    parts = text.split(_MARK)
    return [_read(part, json.loads(program)) for part, program in zip(parts[::2], parts[1::2], strict=False)]


_MARK = "\n@@program@@\n"


def _read(text: str, program: dict[str, int]) -> Assembly:
    report = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    reports = [[int(v) for v in found] for found in re.findall(report, text, flags=re.DOTALL)]
    modules = re.split(r"(?=^\.version )", text, flags=re.MULTILINE)[1:]
    kernels = [
        Kernel(registers, stack, stores + loads, {opcode: module.count(opcode) for opcode in _OPCODES})
        for (stack, stores, loads, registers), module in zip(reports, modules, strict=True)
    ]
    return Assembly(tuple(kernels), **program)


def _compile(gpu: str, implementation: Implementation, shapes: list[Shape]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshes.targets import target
    from pallas_kernels.int4_moe.api import int4_moe
    from pallas_kernels.int4_moe.plan import target_of

    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=gpu, topology="1x1x1", target_config=target(gpu)
    )
    device = topology.devices[0]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())

    def argument(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    for s in shapes:
        pairs = (s.rows, s.top_k)
        operands = [
            argument((s.rows, s.hidden), jnp.bfloat16),
            argument(pairs, jnp.int32),
            argument(pairs, jnp.float32),
        ]
        for a, b in ((s.width, s.hidden), (s.width, s.hidden), (s.hidden, s.width)):
            operands.append(argument((s.slots, a, b // 8), jnp.int32))
            operands.append(argument((s.slots, a, b // 32), jnp.bfloat16))

        def call(*operands: jax.Array, shape: Shape = s) -> jax.Array:
            return int4_moe(
                *operands, num_experts=shape.num_experts, implementation=implementation, target=target_of(device)
            )

        compiled = jax.jit(call).lower(*operands).compile()
        program = compiled.as_text()
        assert program is not None
        entry = program[program.index("\nENTRY ") :]
        launches = len(re.findall(r"= [^=]* (?:fusion|custom-call|sort|copy|while|call)\(", entry))
        sizes = {str(o.size) for o in operands[3:]}
        copied = 0
        for dims in re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|slice|dynamic-slice|fusion|transpose)\(", entry):
            elements = str(int(np.prod([int(d) for d in dims.split(",") if d])))
            copied += int(elements) if elements in sizes else 0
        memory = compiled.memory_analysis()
        assert memory is not None
        report = {"launches": launches, "temporary_bytes": memory.temp_size_in_bytes, "copied_bytes": copied}
        ctypes.CDLL(None).fflush(None)  # what the compiler printed through C's buffers
        print(f"{_MARK}{json.dumps(report)}{_MARK}", end="", flush=True)


def main() -> None:
    """Print the report of one shape, or serve `assemble`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--implementation", default="auto")
    for field, default in (("rows", 64), ("top_k", 8), ("slots", 48), ("hidden", 7168), ("width", 2048)):
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--num-experts", type=int, default=384)
    arguments = parser.parse_args()
    if arguments.request:
        gpu, implementation, shapes = json.loads(arguments.request)
        _compile(gpu, implementation, [Shape(**s) for s in shapes])
        return
    shape = Shape(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(Shape)})
    for assembly in assemble(arguments.gpu, [shape], arguments.implementation):
        print(json.dumps(dataclasses.asdict(assembly), indent=2))


if __name__ == "__main__":
    main()
