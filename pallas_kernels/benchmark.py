"""Both operations on the machine at hand: what each implementation computes, and how long it takes on a GPU."""

import re
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from meshes.hardware import GPUS, gpu
from pallas_kernels.int4_moe import Target, current_target
from pallas_kernels.int4_moe import benchmark as experts
from pallas_kernels.int4_moe.shapes import SHAPES as EXPERT_SHAPES
from pallas_kernels.timing import Case, Result, compare, copy_bytes_per_s, timed
from pallas_kernels.tree_attention import benchmark as attention
from pallas_kernels.tree_attention.selection import Device, current_device
from pallas_kernels.tree_attention.shapes import SHAPES as ATTENTION_SHAPES

OPERATIONS = ("int4_moe", "tree_attention")
SIMULATED_CORES = 3


def measure(
    operations: Sequence[str], shapes: str, repeats: int, progress: Callable[[str], None]
) -> tuple[dict[str, object], list[Result]]:
    """Times every implementation on the shapes whose names match the regular expression; also says on what it ran.

    Raises:
      ValueError: no shape has such a name.
    """
    device, target = current_device(), current_target()
    card = next((g for g in GPUS.values() if device.kind.startswith(g.device_kind)), None)
    copy_rate = copy_bytes_per_s(repeats)
    makers: dict[str, Callable[[], Case]] = {}
    if "int4_moe" in operations:
        makers |= {n: lambda n=n: experts.case(n, EXPERT_SHAPES[n], target) for n in experts.TIMED}
    if "tree_attention" in operations:
        makers |= {n: lambda n=n, s=s: attention.case(n, s, device) for n, s in ATTENTION_SHAPES.items()}
    results = []
    for case in _cases(makers, shapes):
        for implementation in case.calls:
            progress(f"{case.operation} {case.shape} {implementation}")
            results.append(timed(case, compare(case, implementation), card, copy_rate, repeats))
    return {"device": device.kind, "jax": jax.__version__, "copy_bytes_per_s": copy_rate}, results


def interpret(
    card: str, operations: Sequence[str], progress: Callable[[str], None]
) -> tuple[dict[str, object], list[Result]]:
    """The values of the kernels that a card would take, small shapes, in Mosaic's interpreter; nothing is timed.

    Raises:
      ValueError: the card is unknown or has no kernels.
      RuntimeError: a race.
    """
    facts = gpu(card)
    major, minor = facts.compute_capability
    target = Target(facts.device_kind, f"{major}.{minor}", SIMULATED_CORES)
    device = Device("gpu", facts.device_kind, SIMULATED_CORES)
    if device.kernel is None or target.architecture is None:
        raise ValueError(f"there are no kernels for {facts.device_kind}: give h200 or gb300")
    params = plgpu.InterpretGPUParams(detect_races=True)
    cases = []
    if "int4_moe" in operations:
        cases += [experts.case(n, s, target, interpret=True, sets=1) for n, s in experts.SMALL.items()]
    if "tree_attention" in operations:
        cases += [attention.case(n, s, device, interpret=params, sets=1) for n, s in attention.SMALL.items()]
    results = []
    with plgpu.force_gpu_interpret_mode(params):
        for case in cases:
            for implementation in case.calls:
                progress(f"{case.operation} {case.shape} {implementation}")
                results.append(compare(case, implementation))
    return {"device": f"{facts.device_kind}, interpreted on a CPU", "jax": jax.__version__}, results


def _cases(makers: dict[str, Callable[[], Case]], shapes: str) -> Iterator[Case]:
    """One at a time: a case holds gigabytes."""
    names = [name for name in makers if re.search(shapes, name)]
    if not names:
        raise ValueError(f"no shape matches {shapes!r}; there are {', '.join(makers)}")
    for name in names:
        yield makers[name]()
