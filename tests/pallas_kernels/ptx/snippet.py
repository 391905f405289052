"""Small hand-written PTX: a body between loads of each thread's inputs and stores of its outputs."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from ptx.decode import Decoder
from ptx.machine import Cluster, Launch, Order
from ptx.memory import Bytes, TensorMap, buffer_address
from ptx.parser import parse

HEAD = """
.version 8.8
.target sm_103a
.address_size 64
.visible .entry snippet(.param .u64 inputs, .param .u64 outputs, .param .align 64 .b8 map[128])
{
.reg .pred %p<9>;
.reg .b16 %h<9>;
.reg .b32 %r<99>;
.reg .b64 %d<99>;
.shared .align 1024 .b8 memory[SHARED];
.reg .b64 in, out, lane, map_address;
.reg .b32 thread, base;
mov.u32 thread, %tid.x;
mov.b32 base, memory;
mov.b64 map_address, map;
cvta.param.u64 map_address, map_address;
cvt.u64.u32 lane, thread;
shl.b64 lane, lane, 3;
ld.param.b64 in, [inputs];
ld.param.b64 out, [outputs];
"""


def run(
    body: str,
    inputs: Sequence[np.ndarray] | np.ndarray = (),
    outputs: Sequence[str] = (),
    *,
    threads: int = 32,
    shared: int = 1024,
    cluster: int = 1,
    tensor: TensorMap | None = None,
    order: Order | None = None,
    memory: np.ndarray | None = None,
    waiting: Sequence[tuple[int, int, int]] = (),
) -> list[np.ndarray]:
    """Run a body whose inputs are %d0, %d1, ... (64 bits a thread, the low half also in %r0, %r1, ...).

    Args:
        body: PTX statements.
        inputs: an array a register, over the threads of all CTAs.
        outputs: registers whose values are returned, 32 or 64 bits wide.
        threads: of a CTA.
        shared: bytes of shared memory, at `base`.
        cluster: CTAs, all in one cluster.
        tensor: what `map_address` describes.
        order: when things happen.
        waiting: first CTAs of clusters that have not begun.
        memory: bytes that shared memory begins with, instead of ones.

    Returns:
        An array of 64-bit values for each output.
    """
    total = threads * cluster
    text = HEAD.replace("SHARED", str(shared))
    text += f"mov.u32 %r98, %ctaid.x;\nmad.lo.u32 %r98, %r98, {threads}, thread;\n"
    text += "cvt.u64.u32 lane, %r98;\nshl.b64 lane, lane, 3;\nadd.u64 in, in, lane;\nadd.u64 out, out, lane;\n"
    for i in range(len(inputs)):
        text += f"ld.global.b64 %d{i}, [in+{8 * total * i}];\ncvt.u32.u64 %r{i}, %d{i};\n"
    text += body + "\n"
    for i, name in enumerate(outputs):
        width = 64 if name.startswith("%d") else 32
        if name.startswith("%p"):
            text += f"selp.b32 %r97, 1, 0, {name};\n"
            name = "%r97"
        text += f"st.global.b{width} [out+{8 * total * i}], {name};\n"
    decoder = Decoder(parse(text + "ret;\n}\n"))
    given = np.zeros((max(len(inputs), 1), total), np.uint64)
    for row, values in zip(given, inputs, strict=False):
        row[:] = np.asarray(values).astype(np.int64).view(np.uint64)
    given.flags.writeable = False
    result = Bytes(np.zeros(max(len(outputs), 1) * total * 8, np.uint8), "outputs")
    parameters = np.zeros(decoder.program.parameter_bytes, np.uint8)
    parameters[:16] = np.array([buffer_address(0), buffer_address(1)], np.uint64).view(np.uint8)
    launch = Launch(
        (cluster, 1, 1),
        (threads, 1, 1),
        (cluster, 1, 1),
        0,
        (Bytes(given.reshape(-1).view(np.uint8), "inputs"), result, *([tensor.buffer] if tensor else [])),
        Bytes(parameters, "parameters"),
        {(1 << 60) + decoder.program.parameters["map"]: tensor} if tensor else {},
    )
    running = Cluster(decoder, launch, (0, 0, 0), order or Order(), deque(waiting))
    if memory is not None:
        for block in running.shared:
            block.u8[: memory.size] = memory.reshape(-1).view(np.uint8)
    running.run()
    return list(result.views[8].reshape(-1, total)[: len(outputs)])
