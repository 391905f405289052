"""What the compiler makes of the kernels for a card that need not be there: PTX, registers, spills, copies.

    python -m pallas_kernels.assembly --gpu h200 --operation int4_moe --shape ep-48-rows-64

Needs jax's CUDA plugin. Each call compiles in its own process: a kernel that a target cannot assemble ends it.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshes.targets import target
from pallas_kernels.assembler import PTX, PTXAS, Assembled, caught_output, read
from pallas_kernels.operation import Device, Operation
from pallas_kernels.registry import OPERATIONS

COPIES = r"= \w+\[([\d,]*)\]\S* (?:copy|slice|dynamic-slice|fusion|transpose)\("
LAUNCHES = r"= [^=]* (?:fusion|custom-call|sort|copy|while|call)\("


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A compiled call: its kernels with their PTX, both by name, and what XLA put around them."""

    kernels: dict[str, Assembled]
    ptx: dict[str, str]
    launches: int
    temporary_bytes: int
    copied_elements: int
    """Elements of results of copies and slices in the optimised program that are as large as one of the weights or
    caches: 0 where those are read in place."""


def assemble(gpu: str, operation: str, shapes: Sequence[str], implementation: str = "auto") -> list[Assembly]:
    """Compiles an operation at named shapes for a GPU of `meshes.targets.TARGETS`, without having one.

    Raises:
      RuntimeError: the compile failed; the message is the compiler's.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    code = (
        f"from pallas_kernels.assembly import _child; _child({gpu!r}, {operation!r}, {[*shapes]}, {implementation!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise RuntimeError(f"compiling for {gpu} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        Assembly(**report | {"kernels": {name: Assembled(**fields) for name, fields in report["kernels"].items()}})
        for report in reports
    ]


def _child(gpu: str, operation: str, shapes: Sequence[str], implementation: str) -> None:
    for name in shapes:
        print(json.dumps(dataclasses.asdict(compiled(gpu, OPERATIONS[operation], name, implementation))), flush=True)


def compiled(gpu: str, operation: Operation, shape: str, implementation: str = "auto") -> Assembly:
    """Compiles in this process, which assembles a kernel only the first time that it meets it.

    Raises:
      ValueError: the operation has no such shape, or no kernel for it.
    """
    if shape not in operation.shapes:
        raise ValueError(f"{operation.name} has no shape {shape!r}: choose from {', '.join(operation.shapes)}")
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=gpu, topology="1x1x1", target_config=target(gpu)
    )
    device, sizes = topology.devices[0], operation.shapes[shape]
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    operands = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        jax.eval_shape(lambda: operation.problem(sizes)),
    )
    choice = operation.choose(sizes, jnp.bfloat16, Device.of(device), implementation)
    with caught_output(True, (PTXAS, PTX)) as printed:
        program = jax.jit(lambda *arguments: operation.run(choice, *arguments)).lower(*operands).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    entry = text[text.index("\nENTRY ") :]
    held = {leaf.size for leaf in jax.tree.leaves([operands[i] for i in operation.read_in_place])}
    results = [int(np.prod([int(d) for d in dims.split(",") if d])) for dims in re.findall(COPIES, entry)]
    modules = re.split(r"(?=^\.version )", printed[0], flags=re.MULTILINE)[1:]
    named = {found[1]: module for module in modules if (found := re.search(r"\.visible \.entry (\w+)", module))}
    return Assembly(
        kernels={kernel.name: kernel for kernel in read(printed[0])},
        ptx=named,
        launches=len(re.findall(LAUNCHES, entry)),
        temporary_bytes=memory.temp_size_in_bytes,
        copied_elements=sum(size for size in results if size in held),
    )


def main(
    operation: str = "int4_moe",
    shape: str = "ep-48-rows-64",
    gpu: str = "h200",
    implementation: str = "auto",
    ptx: Annotated[bool, tyro.conf.arg(help="Print the PTX too.")] = False,
) -> None:
    """Prints what ptxas and XLA report of an operation at one of its named shapes."""
    for assembly in assemble(gpu, operation, [shape], implementation):
        report = dataclasses.asdict(assembly)
        text = report.pop("ptx")
        print(json.dumps(report, indent=2))
        if ptx:
            print(*text.values(), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
