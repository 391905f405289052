"""Arithmetic, logic, comparison and conversion: one entry of the table for each opcode.

Float32 results are NumPy's, rounded to nearest even; `fma` is computed in float64 and rounded once more, `.approx`
functions are exact to float32. `.ftz` flushes subnormal inputs and results to zero.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ptx.decode import KINDS, WIDTHS, Decoder, Run, immediate, kind_of
from ptx.parser import Instruction, PtxError, Vector

PRED, U16, U32, F32, U64 = (KINDS[k] for k in ("pred", "u16", "u32", "f32", "u64"))
TINY = np.float32(2.0**-126)
ROUNDINGS = {"rn", "approx", "full"}


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zero of their sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Bits of float32 values rounded to nearest even."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 values of the low and the high bfloat16 of 32-bit words."""
    return (words << np.uint32(16)).view(np.float32), (words & np.uint32(0xFFFF0000)).view(np.float32)


def modifiers(instruction: Instruction, rest: tuple[str, ...], known: set[str]) -> tuple[str, list[str]]:
    """The type, which comes last, and the other modifiers, each of which must be known."""
    *others, type_name = rest
    unknown = [o for o in others if o not in known]
    if unknown:
        raise PtxError(f"modifier .{unknown[0]} is not known")
    return type_name, others


def elementwise(integer: Callable | None, floating: Callable | None, count: int) -> Callable[..., Run]:
    """An entry for an operation on `count` operands: a NumPy function for integers and bits, and one for floats."""

    def entry(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
        type_name, others = modifiers(instruction, rest, ROUNDINGS | {"ftz", "lo", "NaN", "relu", "uni"})
        if len(instruction.operands) != count + 1:
            raise PtxError(f"{len(instruction.operands)} operands, not {count + 1}")
        if type_name in ("bf16x2", "f32x2"):
            return packed(decoder, instruction, type_name, floating)
        kind = kind_of(type_name)
        is_float = type_name.startswith("f")
        function = floating if is_float else integer
        if function is None:
            raise PtxError(f"type .{type_name} is not known here")
        destination = decoder.write(instruction.operands[0], kind)
        sources = [decoder.read(o, kind) for o in instruction.operands[1:]]
        if is_float and "ftz" in others:
            return _flushing(function, kind, destination, sources)
        if isinstance(function, np.ufunc) and "relu" not in others:
            if count == 1:
                (a,) = sources
                return lambda t, where: function(t[kind][a], out=t[kind][destination], where=where)
            a, b = sources
            return lambda t, where: function(t[kind][a], t[kind][b], out=t[kind][destination], where=where)
        relu = (lambda x: np.maximum(x, 0)) if "relu" in others else (lambda x: x)

        def run(t: Any, where: Any) -> None:
            np.copyto(t[kind][destination], relu(function(*(t[kind][s] for s in sources))), where=where)

        return run

    return entry


def _flushing(function: Callable, kind: int, destination: int, sources: list[int]) -> Run:
    def run(t: Any, where: Any) -> None:
        np.copyto(t[kind][destination], flush(function(*(flush(t[kind][s]) for s in sources))), where=where)

    return run


def packed(decoder: Decoder, instruction: Instruction, type_name: str, function: Callable | None) -> Run:
    """Two values in a register: bfloat16 in 32 bits, or float32 in 64."""
    if function is None:
        raise PtxError(f"type .{type_name} is not known here")
    kind = U32 if type_name == "bf16x2" else U64
    destination = decoder.write(instruction.operands[0], kind)
    sources = [decoder.read(o, kind) for o in instruction.operands[1:]]
    if type_name == "f32x2":

        def run(t: Any, where: Any) -> None:
            # A register's pair lies side by side in memory: one operation on twice as many float32.
            values = [np.ascontiguousarray(t[U64][s]).view(np.float32) for s in sources]
            np.copyto(t[U64][destination], function(*values).view(np.uint64), where=where)

        return run

    def run16(t: Any, where: Any) -> None:
        low, high = zip(*(halves(t[U32][s]) for s in sources), strict=True)
        low_bits, high_bits = to_bfloat16(function(*low)), to_bfloat16(function(*high))
        result = low_bits.astype(np.uint32) | (high_bits.astype(np.uint32) << np.uint32(16))
        np.copyto(t[U32][destination], result, where=where)

    return run16


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c, the product exact."""
    return (a.astype(np.float64) * b + c).astype(a.dtype)


def mov(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mov`: also packs a vector of registers into a wider one, or unpacks it."""
    kind = kind_of(rest[-1])
    target, source = instruction.operands
    if isinstance(target, Vector):
        return _unpack(decoder, target, source, kind)
    destination = decoder.write(target, kind)
    if isinstance(source, Vector):
        width = WIDTHS[rest[-1].replace("b", "u")] // len(source.items)
        part = kind_of(f"u{width}")
        parts = [decoder.read(i, part) for i in source.items]

        def pack(t: Any, where: Any) -> None:
            view = t[part][parts[0]]
            joined = np.empty((t.size, len(parts)), view.dtype)
            for i, row in enumerate(parts):
                joined[:, i] = t[part][row]
            np.copyto(t[kind][destination], joined.view(t[kind][destination].dtype)[:, 0], where=where)

        return pack
    row = decoder.read(source, kind)
    return lambda t, where: np.copyto(t[kind][destination], t[kind][row], where=where)


def _unpack(decoder: Decoder, target: Vector, source: Any, kind: int) -> Run:
    width = (64 if kind == U64 else 32) // len(target.items)
    part = kind_of(f"u{width}")
    row = decoder.read(source, kind)
    parts = [(i, decoder.write(o, part)) for i, o in enumerate(target.items)]

    def unpack(t: Any, where: Any) -> None:
        pieces = np.ascontiguousarray(t[kind][row]).view(t[part][parts[0][1]].dtype).reshape(t.size, -1)
        for i, destination in parts:
            np.copyto(t[part][destination], pieces[:, i], where=where)

    return unpack


def shift(left: bool) -> Callable[..., Run]:
    """`shl`, `shr`: amounts past the width leave zero, or the sign."""

    def entry(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
        kind = kind_of(rest[-1])
        width = int(rest[-1][1:])
        signed = rest[-1].startswith("s")
        destination, source = (
            f(o, kind) for f, o in zip((decoder.write, decoder.read), instruction.operands, strict=False)
        )
        amount = decoder.read(instruction.operands[2], U32)

        def run(t: Any, where: Any) -> None:
            x, n = t[kind][source], t[U32][amount]
            by = np.minimum(n, width - 1).astype(x.dtype)
            result = x << by if left else x >> by
            if not signed or left:
                result = np.where(n < width, result, 0)
            np.copyto(t[kind][destination], result, where=where)

        return run

    return entry


def extract(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`bfe`: some bits from a place on, then zeros, or the sign: that of the last bit, or of the whole past its end."""
    kind, width, signed = kind_of(rest[-1]), int(rest[-1][1:]), rest[-1].startswith("s")
    destination, source = (
        f(o, kind) for f, o in zip((decoder.write, decoder.read), instruction.operands, strict=False)
    )
    place, count = (decoder.read(o, U32) for o in instruction.operands[2:4])

    def run(t: Any, where: Any) -> None:
        x, at, wanted = t[kind][source], t[U32][place] & 0xFF, t[U32][count] & 0xFF
        there = np.minimum(wanted, width - np.minimum(at, width))  # bits of the source among those
        kept = np.maximum(there, 1)
        up, down = (n.astype(x.dtype) for n in (width - kept - np.minimum(at, width - kept), width - kept))
        past = x >> np.array(width - 1, x.dtype) if signed else np.zeros_like(x)
        result = np.where(there > 0, x << up >> down, past)
        np.copyto(t[kind][destination], np.where(wanted > 0, result, 0), where=where)

    return run


def multiply(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`mul` and `mad` of integers, with `.lo`, `.hi` or `.wide`; of floats as every other operation."""
    adds = instruction.parts[0] == "mad"
    if rest[0] not in ("lo", "hi", "wide"):
        return elementwise(None, np.multiply, 2)(decoder, instruction, rest)
    half, type_name = rest
    kind, width = kind_of(type_name), int(type_name[1:])
    wide = kind_of(f"{type_name[0]}{2 * width}") if half == "wide" else kind
    destination = decoder.write(instruction.operands[0], wide)
    a, b = (decoder.read(o, kind) for o in instruction.operands[1:3])
    c = decoder.read(instruction.operands[3], wide) if adds else None

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if half == "lo":
            return x * y
        if half == "wide" or width < 64:
            full = {16: np.int64, 32: np.int64, 64: np.int64}[width] if type_name[0] == "s" else np.uint64
            result = x.astype(full) * y.astype(full)
            return result if half == "wide" else result >> full(width)
        exact = x.astype(object) * y.astype(object) >> 64
        return np.array([int(v) & (2**64 - 1) for v in exact], np.uint64).view(x.dtype)

    def run(t: Any, where: Any) -> None:
        result = product(t[kind][a], t[kind][b]).astype(t[wide][destination].dtype)
        np.copyto(t[wide][destination], result if c is None else result + t[wide][c], where=where)

    return run


_COMPARISONS: dict[str, tuple[Callable, bool]] = {
    # The function, and whether its result is inverted: an unordered comparison is true where one side is NaN.
    "eq": (np.equal, False), "ne": (np.not_equal, False), "lt": (np.less, False), "le": (np.less_equal, False),
    "gt": (np.greater, False), "ge": (np.greater_equal, False), "lo": (np.less, False), "ls": (np.less_equal, False),
    "hi": (np.greater, False), "hs": (np.greater_equal, False), "equ": (np.not_equal, True), "neu": (np.equal, True),
    "ltu": (np.greater_equal, True), "leu": (np.greater, True), "gtu": (np.less_equal, True), "geu": (np.less, True),
}  # fmt: skip


def setp(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`setp`: a comparison, combined with a predicate where one is given."""
    comparison, *others, type_name = rest
    kind = kind_of(type_name)
    others = [o for o in others if o != "ftz"]
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[others[0]] if others else None
    if comparison not in _COMPARISONS:
        raise PtxError(f"comparison .{comparison} is not known")
    function, inverted = _COMPARISONS[comparison]
    is_float = type_name.startswith("f")
    if comparison == "neu" and not is_float:
        raise PtxError("an unordered comparison of integers")
    destination = decoder.write(instruction.operands[0], PRED)
    a, b = (decoder.read(o, kind) for o in instruction.operands[1:3])
    also = decoder.read(instruction.operands[3], PRED) if combine else None

    def run(t: Any, where: Any) -> None:
        x, y = t[kind][a], t[kind][b]
        result = function(x, y)
        if inverted:
            result = ~result
        elif is_float and comparison == "ne":
            result = result & ~(np.isnan(x) | np.isnan(y))
        if combine is not None:
            result = combine(result, t[PRED][also])
        np.copyto(t[PRED][destination], result, where=where)

    return run


def selp(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`selp`: one of two values by a predicate."""
    kind = kind_of(rest[-1].replace("f", "u"))
    destination, *sources = instruction.operands
    d = decoder.write(destination, kind)
    a, b = (decoder.read(o, kind) for o in sources[:2])
    p = decoder.read(sources[2], PRED)
    return lambda t, where: np.copyto(t[kind][d], np.where(t[PRED][p], t[kind][a], t[kind][b]), where=where)


def lop3(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`lop3`: any function of three bits, by its truth table over a = 0xF0, b = 0xCC, c = 0xAA."""
    d, *sources = instruction.operands
    destination = decoder.write(d, U32)
    rows = [decoder.read(s, U32) for s in sources[:3]]
    table = immediate(sources[3])

    def run(t: Any, where: Any) -> None:
        a, b, c = (t[U32][r] for r in rows)
        if table == 0xEA:  # the most frequent, (a & b) | c
            result = (a & b) | c
        else:
            result = np.zeros_like(a)
            for bits in range(8):
                if table >> bits & 1:
                    result |= (a if bits & 4 else ~a) & (b if bits & 2 else ~b) & (c if bits & 1 else ~c)
        np.copyto(t[U32][destination], result, where=where)

    return run


def prmt(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`prmt`: four bytes of eight; a selector's high bit repeats the byte's sign."""
    if rest != ("b32",):
        raise PtxError(f"mode .{rest[-2]} is not known")
    d, *sources = instruction.operands
    destination = decoder.write(d, U32)
    a, b, s = (decoder.read(o, U32) for o in sources)

    def run(t: Any, where: Any) -> None:
        both = np.stack([t[U32][a], t[U32][b]], -1).view(np.uint8)
        result = np.empty((t.size, 4), np.uint8)
        for byte in range(4):
            selector = t[U32][s] >> np.uint32(4 * byte)
            value = np.take_along_axis(both, (selector & 7).astype(np.intp)[:, None], 1)[:, 0]
            result[:, byte] = np.where(selector & 8, np.where(value & 0x80, 0xFF, 0), value)
        np.copyto(t[U32][destination], result.view(np.uint32)[:, 0], where=where)

    return run


def cvt(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`cvt`: between integers, from float32 to bfloat16 (also two at once) and back, between floats and integers."""
    *mods, to, of = rest
    unknown = [m for m in mods if m not in ("rn", "rzi", "rni", "rmi", "rpi", "sat", "ftz")]
    if unknown or "sat" in mods:
        raise PtxError(f"modifier .{(unknown or ['sat'])[0]} is not known")
    d, *sources = instruction.operands
    if to == "bf16x2":
        destination = decoder.write(d, U32)
        high, low = (decoder.read(s, F32) for s in sources)

        def pack(t: Any, where: Any) -> None:
            bits = to_bfloat16(t[F32][low]).astype(np.uint32)
            np.copyto(
                t[U32][destination], bits | to_bfloat16(t[F32][high]).astype(np.uint32) << np.uint32(16), where=where
            )

        return pack
    source, destination = (U16 if n == "bf16" else kind_of(_held(n)) for n in (of, to))
    # A register may be wider than the type that is read from it or written to it.
    width = decoder.width(sources[0])
    source_row = decoder.read(sources[0], source if width is None else _widest(source, width))
    source_view = source if width is None else _widest(source, width)
    target = _widest(destination, decoder.width(d) or 16)
    row = decoder.write(d, target)
    source_type, target_type = (
        np.dtype(f"{n[0].replace('s', 'i')}{int(n[1:]) // 8}") if n != "bf16" else None for n in (of, to)
    )

    def run(t: Any, where: Any) -> None:
        x = t[source_view][source_row]
        x = from_bfloat16(x) if source_type is None else (x if x.dtype == source_type else x.astype(source_type))
        if target_type is None:
            x = to_bfloat16(x.astype(np.float32))
        elif x.dtype.kind == "f" and target_type.kind in "iu":
            limits = np.iinfo(target_type)
            rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
            rounded = next(f for m, f in rounding.items() if m in mods)(x.astype(np.float64))
            x = np.clip(np.nan_to_num(rounded), limits.min, limits.max).astype(target_type)
        else:
            x = x.astype(target_type)
        np.copyto(t[target][row], x.astype(t[target][row].dtype), where=where)

    return run


def _held(type_name: str) -> str:
    """The type whose registers hold values of a type: bytes lie in 16 bits."""
    return f"{type_name[0]}16" if type_name in ("s8", "u8") else type_name


def _widest(kind: int, width: int) -> int:
    """The view of a kind's sign in a register of this width."""
    name = next(n for n, k in KINDS.items() if k == kind)
    return KINDS[f"{name[0]}{max(width, WIDTHS[name])}"]


def cvta(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`cvta`: addresses are one space here."""
    return mov(decoder, instruction, rest)


def _not(x: np.ndarray) -> np.ndarray:
    return ~x


def _maximum(nan: Callable, plain: Callable) -> Callable[..., Run]:
    """`max`, `min` of two or three: `.NaN` makes the result NaN if one operand is; without it NaN is passed over."""

    def entry(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
        floating, count = nan if "NaN" in rest else plain, len(instruction.operands) - 1
        if count == 3:
            return elementwise(None, lambda x, y, z: floating(floating(x, y), z), 3)(decoder, instruction, rest)
        return elementwise(nan, floating, 2)(decoder, instruction, rest)

    return entry


TABLE = {
    name: (function, False)
    for name, function in {
        "add": elementwise(np.add, np.add, 2),
        "sub": elementwise(np.subtract, np.subtract, 2),
        "mul": multiply,
        "mad": multiply,
        "fma": elementwise(None, fused, 3),
        "div": elementwise(np.floor_divide, np.divide, 2),
        "and": elementwise(np.bitwise_and, None, 2),
        "or": elementwise(np.bitwise_or, None, 2),
        "xor": elementwise(np.bitwise_xor, None, 2),
        "not": elementwise(_not, None, 1),
        "neg": elementwise(np.negative, np.negative, 1),
        "abs": elementwise(np.absolute, np.absolute, 1),
        "max": _maximum(np.maximum, np.fmax),
        "min": _maximum(np.minimum, np.fmin),
        "ex2": elementwise(None, np.exp2, 1),
        "lg2": elementwise(None, np.log2, 1),
        "rcp": elementwise(None, np.reciprocal, 1),
        "sqrt": elementwise(None, np.sqrt, 1),
        "rsqrt": elementwise(None, lambda x: 1 / np.sqrt(x), 1),
        "mov": mov,
        "shl": shift(True),
        "shr": shift(False),
        "bfe": extract,
        "setp": setp,
        "selp": selp,
        "lop3": lop3,
        "prmt": prmt,
        "cvt": cvt,
        "cvta": cvta,
    }.items()
}
