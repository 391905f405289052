"""What a compiled program reads, writes and launches on one device, by part of the model."""

import dataclasses
from collections.abc import Iterator, Mapping

from kimi_jax.ledger.launches import Launches
from kimi_jax.profiling.hlo import COLLECTIVES, FORWARDING, Instruction, Module, part_of

_SLICES = ("slice", "dynamic-slice", "gather")
_IN_PLACE = ("scatter", "dynamic-update-slice")
_FREE = ("parameter", "tuple", "get-tuple-element", "constant", "partition-id", "replica-id", "after-all", *FORWARDING)
CONTROL = ("while", "call", "conditional", "async-start", "async-update")
_LAYOUT_ONLY = (
    "parameter", "bitcast", "copy", "slice", "dynamic-slice", "transpose", "reshape", "concatenate", "pad", "constant",
    "tuple", "get-tuple-element", "convert", "broadcast",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Hand-written kernels of one name in one part."""

    name: str
    part: str
    count: int


@dataclasses.dataclass(frozen=True)
class Materialised:
    """A part of a weight or of the cache that the program writes to memory again before it uses it."""

    array: str
    operation: str
    bytes: int
    part: str


def kernels(module: Module) -> list[Kernel]:
    """Pallas kernels, by part."""
    counts: dict[tuple[str, str], int] = {}
    for _, instruction, count in module.executed():
        if is_kernel(instruction):
            key = (kernel_name(instruction), part_of(instruction.op_name))
            counts[key] = counts.get(key, 0) + count
    return sorted((Kernel(name, part, n) for (name, part), n in counts.items()), key=lambda k: (k.part, k.name))


def custom_calls(module: Module) -> dict[str, int]:
    """All custom calls by target."""
    counts: dict[str, int] = {}
    for _, instruction, count in module.executed():
        if instruction.opcode == "custom-call":
            counts[instruction.target] = counts.get(instruction.target, 0) + count
    return counts


def launches(module: Module) -> dict[str, Launches]:
    """What is started, by part.

    On a GPU the host reads the predicate of every choice, and of loops of unknown length twice at least.
    """
    counts: dict[str, dict[str, int]] = {}
    for _, instruction, count in module.executed():
        what, op_name = _started(module, instruction)
        if what is not None:
            of_part = counts.setdefault(part_of(op_name), {})
            unsure = what == "host_waits" and instruction.opcode == "while"
            of_part[what] = of_part.get(what, 0) + count * (2 if unsure else 1)
    return {part: Launches(**each) for part, each in counts.items()}


def _started(module: Module, instruction: Instruction) -> tuple[str | None, str]:
    """The field of `Launches` that an instruction counts in, if any, and the operation it came from."""
    opcode, op_name = instruction.opcode, instruction.op_name
    if opcode == "conditional" or (opcode == "while" and "known_trip_count" not in instruction.attributes):
        return "host_waits", op_name
    if opcode in _FREE or opcode in CONTROL or opcode.endswith("-done") or instruction.target == "AllocateBuffer":
        return None, op_name
    if opcode.removesuffix("-start") in COLLECTIVES:
        return "messages", op_name
    if opcode in ("fusion", "fusion-start"):
        for inside in module.computations[instruction.fused].values():
            if inside.opcode.removesuffix("-start") in COLLECTIVES:
                return "collective_kernels", inside.op_name
    return "kernels", op_name


def host_transfers(module: Module) -> list[str]:
    """Instructions that send to or wait for the host: callbacks, infeed, outfeed, copies to host memory."""
    found = []
    for _, instruction, _ in module.executed():
        callback = instruction.opcode == "custom-call" and "callback" in instruction.target
        # S(5) is XLA's host memory space.
        to_host = "S(5)" in instruction.attributes and instruction.opcode.startswith("copy")
        if callback or to_host or instruction.opcode in ("infeed", "outfeed", "send", "recv"):
            found.append(f"{instruction.opcode} {instruction.name} ({instruction.op_name})")
    return found


def reads(module: Module) -> dict[tuple[str, str], int]:
    """Bytes that instructions read of each argument, by (argument, part); a slice inside a fusion reads its size.

    A kernel is taken to read its whole operand once, also one that it is given twice.
    """
    totals: dict[tuple[str, str], int] = {}
    for computation, instruction, count in launched(module):
        for name in dict.fromkeys(instruction.operands):
            source = module.source(computation, name)
            if source is not None:
                key = (source, part_of(instruction.op_name))
                totals[key] = totals.get(key, 0) + count * _read(module, computation, instruction, name)
    return totals


def intermediates(module: Module) -> dict[str, int]:
    """Bytes of activations that XLA's own instructions read and write, by part: everything but arguments and kernels.

    What a fusion keeps in registers is not counted, what it slices counts with the slice's size, and what is updated in
    place with the update's. Pallas kernels are left out: what they touch of an array may depend on its values.
    """
    totals: dict[str, int] = {}
    for computation, instruction, count in launched(module):
        if instruction.opcode == "custom-call":
            continue
        moved = _written(module, computation, instruction)
        for name in dict.fromkeys(instruction.operands):
            if module.source(computation, name) is None:
                moved += _read(module, computation, instruction, name)
        part = part_of(instruction.op_name)
        totals[part] = totals.get(part, 0) + count * moved
    return totals


def materialised(module: Module, smallest: int = 1 << 20, share: float = 1 / 16) -> list[Materialised]:
    """Copies, slices and conversions of arguments of at least `smallest` bytes and this share of the array.

    What is updated in place (the cache's commit) is none: XLA puts a copy of its own where it cannot.
    """
    found = []
    for computation, instruction, _ in module.executed():
        if instruction.opcode not in ("copy", "copy-start", "fusion", "transpose", *_SLICES, "convert"):
            continue
        if instruction.opcode == "fusion" and not _only_moves(module, instruction):
            continue
        for name in instruction.operands:
            source = module.source(computation, name)
            if source is None:
                continue
            whole = module.computations[computation][name].bytes
            written = instruction.results[0].bytes if instruction.opcode == "copy-start" else instruction.bytes
            if written >= max(smallest, share * whole):
                # What joins several arrays writes each of them once.
                size = min(written, whole)
                found.append(Materialised(source, instruction.name, size, part_of(instruction.op_name)))
    return found


def is_kernel(instruction: Instruction) -> bool:
    """Whether it launches a Pallas kernel."""
    return instruction.opcode == "custom-call" and "mosaic" in instruction.target


def kernel_name(instruction: Instruction) -> str:
    """The name a Pallas kernel was given."""
    # Pallas ends the path with the operation that launches; the scope before it is the kernel's own name.
    scopes = [scope for scope in instruction.op_name.split("/") if scope not in ("", "mpmd_map", "pallas_call")]
    return scopes[-1] if scopes else instruction.name


def launched(module: Module) -> Iterator[tuple[str, Instruction, int]]:
    """What moves bytes when it runs, its computation, and how often."""
    for computation, instruction, count in module.executed():
        done = instruction.opcode.endswith("-done")  # the start has moved it
        if not done and instruction.opcode not in _FREE and instruction.opcode not in CONTROL:
            yield computation, instruction, count


def _written(module: Module, computation: str, instruction: Instruction) -> int:
    if instruction.opcode.endswith("-start") and len(instruction.results) > len(instruction.operands):
        # Its result names the operands again before the results.
        scope = module.computations[computation]
        return max(0, instruction.bytes - sum(scope[name].bytes for name in instruction.operands))
    if instruction.opcode in _IN_PLACE:
        return _update(module.computations[computation], instruction)
    if instruction.opcode != "fusion":
        return instruction.bytes
    inner = module.computations[instruction.fused]
    root = module.root(instruction.fused)
    results = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(_update(inner, _behind(inner, r)) or r.bytes for r in results)


def _behind(inner: Mapping[str, Instruction], instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = inner[instruction.operands[0]]
    return instruction


def _update(scope: Mapping[str, Instruction], instruction: Instruction) -> int:
    """Bytes that an update in place writes; 0 for anything else."""
    if instruction.opcode == "dynamic-update-slice":
        return scope[instruction.operands[1]].bytes
    if instruction.opcode == "scatter":
        return scope[instruction.operands[-1]].bytes
    return 0


def _read(module: Module, computation: str, instruction: Instruction, name: str) -> int:
    number, whole = instruction.operands.index(name), module.computations[computation][name].bytes
    if instruction.opcode in _SLICES and number == 0:
        return instruction.bytes
    if instruction.opcode in _IN_PLACE and number == 0:
        return 0
    if not instruction.opcode.startswith("fusion"):
        return whole
    inner = module.computations[instruction.fused]
    parameter = next(i for i in inner.values() if i.opcode == "parameter" and int(i.argument) == number)
    return min(whole, _read_inside(inner, parameter.name, whole))


def _read_inside(inner: Mapping[str, Instruction], name: str, whole: int) -> int:
    total = 0
    for user in (i for i in inner.values() if name in i.operands):
        if user.opcode in _SLICES and user.operands[0] == name:
            total += user.bytes
        elif user.opcode == "bitcast":
            total += _read_inside(inner, user.name, whole)
        elif user.opcode not in _IN_PLACE or user.operands[0] != name:
            return whole
    return total


def _only_moves(module: Module, fusion: Instruction) -> bool:
    return all(i.opcode in _LAYOUT_ONLY for i in module.computations[fusion.fused].values())
