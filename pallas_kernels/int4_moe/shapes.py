"""The shapes that tests, the compile checks and the benchmark share: Kimi K2.6's routed experts as ranks see them."""

from pallas_kernels.int4_moe.plan import Shape

HIDDEN, WIDTH, EXPERTS, TOP_K = 7168, 2048, 384, 8
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL_ROWS = (1024, 2048, 4096)
EP_SLOTS = (6, 8, 12, 24, 48, 384)
TP_SIZES = (2, 4, 8, 16, 32)


def expert_parallel(rows: int, slots: int) -> Shape:
    """A rank that holds `slots` whole experts."""
    return Shape(rows, TOP_K, slots, HIDDEN, WIDTH, EXPERTS)


def tensor_parallel(rows: int, tp: int) -> Shape:
    """A rank that holds 1/`tp` of every expert's width."""
    return Shape(rows, TOP_K, EXPERTS, HIDDEN, WIDTH // tp, EXPERTS)


SHAPES = {
    **{f"ep-{slots}-rows-{rows}": expert_parallel(rows, slots) for slots in EP_SLOTS for rows in ROWS},
    **{f"tp-{tp}-rows-{rows}": tensor_parallel(rows, tp) for tp in TP_SIZES for rows in ROWS},
    **{f"ep-48-rows-{rows}": expert_parallel(rows, 48) for rows in PREFILL_ROWS},
}
