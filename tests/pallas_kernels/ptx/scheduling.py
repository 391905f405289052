"""Cluster launch control: a running cluster takes over the work of one that has not begun.

The 128-bit handle is opaque to programs. Here its low half is 0 where there was none to take over, else an odd number
that holds the coordinates of its first CTA; registers of 128 bits hold that half alone. Pallas makes a multicast
request from every CTA of a cluster and expects one answer, so here that of the first CTA counts.
"""

from typing import Any

import numpy as np

from ptx.copies import issuers
from ptx.decode import KINDS, Decoder, Run, addresses, items
from ptx.memory import RANK_SHIFT
from ptx.parser import Instruction, PtxError

PRED, U32, U64 = (KINDS[k] for k in ("pred", "u32", "u64"))
HANDLE_BYTES = 16


def try_cancel(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`clusterlaunchcontrol.try_cancel`: the handle is written, and its bytes counted, like a bulk copy's."""
    known = {"async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all", "b128"}
    unknown = [r for r in rest if r not in known]
    if unknown:
        raise PtxError(f"modifier .{unknown[0]} is not known")
    target, barrier = (decoder.address(o) for o in instruction.operands)
    low = (1 << RANK_SHIFT) - 1

    def run(t: Any, where: Any) -> None:
        for thread in issuers(t, where):
            at, on = int(addresses(t, target)[thread]), int(addresses(t, barrier)[thread])
            multicast = "multicast::cluster::all" in rest
            if multicast and t.cta.rank:
                continue
            ctas = t.cta.cluster.ctas if multicast else [t.cta]
            taken = t.cta.cluster.take_over()
            handle = 0 if taken is None else 1 | sum(c << (1 + 20 * i) for i, c in enumerate(taken))

            def answer(ctas: Any = ctas, at: int = at, on: int = on, handle: int = handle) -> None:
                for cta in ctas:
                    cta.shared.views[8][(at & low) >> 3 :][:2] = [handle, 0]
                    cta.barrier(cta.rank << RANK_SHIFT | on & low).complete(HANDLE_BYTES)

            t.cta.cluster.later("copy", answer)

    return run


def query(decoder: Decoder, instruction: Instruction, rest: tuple[str, ...]) -> Run:
    """`clusterlaunchcontrol.query_cancel`: whether work was taken over, and the first CTA whose it was."""
    target, source = instruction.operands
    handle = decoder.read(source, U64)
    if rest[0] == "is_canceled":
        found = decoder.write(target, PRED)
        return lambda t, where: np.copyto(t[PRED][found], t[U64][handle] != 0, where=where)
    if rest[:2] != ("get_first_ctaid", "v4"):
        raise PtxError(f"query {'.'.join(rest)} is not known")
    rows = [decoder.write(o, U32) for o in items(target)]

    def run(t: Any, where: Any) -> None:
        for axis, row in enumerate(rows[:3]):
            part = (t[U64][handle] >> np.uint64(1 + 20 * axis)) & np.uint64(0xFFFFF)
            np.copyto(t[U32][row], part.astype(np.uint32), where=where)

    return run


TABLE = {"clusterlaunchcontrol.try_cancel": (try_cancel, False), "clusterlaunchcontrol.query_cancel": (query, False)}
