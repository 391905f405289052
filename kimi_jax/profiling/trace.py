"""A profiler trace by part of the model: XLA keeps the programs, scopes and all, beside the events of their operations.

The events themselves carry only the name of an HLO instruction, which says nothing of the model. The programs lie in
the same file as serialised `HloProto`s, of which a few fields are read here.
"""

import dataclasses
import gzip
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from kimi_jax.profiling.hlo import Instruction, inherit_scopes, part_of
from kimi_jax.profiling.traffic import CONTROL

NAMED = "parts.trace.json.gz"
"""The file with events named by part, for ui.perfetto.dev or chrome://tracing."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One execution of one HLO instruction."""

    name: str
    opcode: str
    """Empty where the trace has no program with such an instruction."""
    scope: str
    line: str
    """The stream or thread it ran on."""
    start_ns: float
    duration_ns: float

    @property
    def part(self) -> str:
        """The model part whose scope it stands in."""
        return part_of(self.scope)

    @property
    def title(self) -> str:
        """Part and layer, as the named trace shows it."""
        layer = re.search(r"layer(\d+)/", self.scope)
        return self.part + (f", layer {layer[1]}" if layer else "")


def operations(directory: Path) -> list[Operation]:
    """The HLO operations of the newest trace in a directory.

    Raises:
      ValueError: a directory without a trace.
    """
    files = sorted(directory.glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise ValueError(f"{directory} holds no profiler trace")
    programs = _programs(files[-1].read_bytes())
    events: defaultdict[tuple[str, str], list[tuple[str, str, float, float]]] = defaultdict(list)
    with warnings.catch_warnings():
        # The reader's own types make Python warn, and abort the process where a warning is an error.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in ProfileData.from_file(str(files[-1])).planes:
            for line in plane.lines:
                for event in line.events:
                    stats = {name: str(value) for name, value in event.stats if name.startswith(("hlo_", "program"))}
                    if "hlo_op" in stats:
                        ran = (stats["hlo_op"], f"{plane.name} {line.name}", event.start_ns, event.duration_ns)
                        events[stats.get("hlo_module", ""), stats.get("program_id", "")].append(ran)
    found = []
    for (module, number), executed in events.items():
        program = _program(programs, module, number, {name for name, *_ in executed})
        for name, line, start_ns, duration_ns in executed:
            instruction = program.get(name)
            known = ("", "") if instruction is None else (instruction.opcode, instruction.op_name)
            found.append(Operation(name, *known, line, start_ns, duration_ns))
    return found


def _program(
    programs: dict[str, dict[str, Instruction]], module: str, number: str, names: set[str]
) -> dict[str, Instruction]:
    """The instructions of the program that ran: of its module's name, with every operation that was seen.

    An executable out of JAX's compilation cache is recorded under another number than its events; where several
    programs could have run, only what they agree on is taken.
    """
    fitting = {
        name: program for name, program in programs.items() if name.split("(")[0] == module and names <= program.keys()
    }
    if f"{module}({number})" in fitting:
        return fitting[f"{module}({number})"]
    first, *others = fitting.values() or [{}]
    return {name: i for name, i in first.items() if all(other.get(name) == i for other in others)}


def part_seconds(found: list[Operation], executions: int) -> dict[str, float]:
    """Seconds that the operations of one execution take on one device, by part, from a trace of so many executions."""
    nanoseconds: Counter[str] = Counter()
    for operation in found:
        if operation.opcode and operation.opcode not in CONTROL:  # a loop lasts as long as what it runs
            nanoseconds[operation.part] += round(operation.duration_ns)
    return {part: total / executions / 1e9 for part, total in nanoseconds.items()}


def write_named(directory: Path) -> Path:
    """Writes the newest trace's operations anew, named by part and layer, as NAMED in the directory.

    Each event's arguments are its HLO name, opcode and scope.
    """
    found = operations(directory)
    lines = {name: number for number, name in enumerate(dict.fromkeys(each.line for each in found))}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in lines.items()
    ]
    events += [
        {
            "ph": "X", "pid": 0, "tid": lines[each.line], "ts": each.start_ns / 1e3, "dur": each.duration_ns / 1e3,
            "name": each.title, "cat": each.part,
            "args": {"hlo_op": each.name, "opcode": each.opcode, "scope": each.scope},
        }
        for each in found
    ]  # fmt: skip
    path = directory / NAMED
    path.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}).encode()))
    return path


def _programs(space: bytes) -> dict[str, dict[str, Instruction]]:
    """The instructions of an XSpace's programs, by program, `module(id)`, and by name."""
    programs = {}
    for plane in map(_fields, _fields(space)[1]):  # XSpace.planes
        if plane[2] != [b"/host:metadata"]:  # XPlane.name
            continue
        for entry in plane[4]:  # XPlane.event_metadata
            metadata = _fields(_only(_fields(entry)[2]))
            instructions: dict[str, Instruction] = {}
            for stat in metadata[5]:  # XEventMetadata.stats
                for proto in _fields(stat)[6]:  # XStat.bytes_value, an HloProto, whose first field is the module
                    for computation in _fields(_only(_fields(proto)[1]))[3]:
                        instructions |= _computation(computation)
            programs[_only(metadata[2]).decode()] = instructions
    return programs


def _computation(message: bytes) -> dict[str, Instruction]:
    """The instructions of an HloComputationProto, each with its scope or that of its neighbours."""
    protos = [_fields(instruction) for instruction in _fields(message)[2]]
    names = {_only(proto[35]): _only(proto[1]).decode() for proto in protos}  # by id
    found = {}
    for proto in protos:
        operands = (names.get(number, "") for packed in proto[36] for number in _varints(packed))
        scope = _only(_fields(_only(proto[7]))[2]).decode()  # metadata.op_name
        attributes = 'metadata={op_name="' + re.sub(r'(["\\])', r"\\\1", scope) + '"}' if scope else ""
        name = _only(proto[1]).decode()
        found[name] = Instruction(name, _only(proto[2]).decode(), (), tuple(operands), attributes, False, "")
    inherit_scopes(found)
    return found


def _only(values: list[Any]) -> Any:
    return values[0] if values else b""


def _fields(message: bytes) -> defaultdict[int, list[Any]]:
    """The fields of a protobuf message by number: integers, and the bytes of everything else."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at : at + size], at + size
        found[key >> 3].append(value)
    return found


def _varints(packed: bytes | int) -> Iterator[int]:
    if isinstance(packed, int):
        yield packed
        return
    at = 0
    while at < len(packed):
        value, at = _varint(packed, at)
        yield value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
