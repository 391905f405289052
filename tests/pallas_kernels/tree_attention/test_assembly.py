"""The kernels at full size, lowered and assembled by the real ptxas for every data-centre card, without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.tree_attention.shapes import SHAPES

ROOT = Path(__file__).parents[3]
CARDS = {
    "h100": ("hopper", "sm_90a"),
    "h200": ("hopper", "sm_90a"),
    "b200": ("blackwell", "sm_100a"),
    "gb200": ("blackwell", "sm_100a"),
    "b300": ("blackwell", "sm_103a"),
    "gb300": ("blackwell", "sm_103a"),
}
# docs/kernels_tree_attention.md: 128 registers of accumulator, 32 of scores, 16 of probabilities and the softmax's
# vectors meet at the 255-register ceiling in the masked tile; what does not fit is addresses and tables.
SPILLED_BYTES = 128
TENSOR_CORE = {"hopper": "wgmma.mma_async.sync.aligned", "blackwell": "tcgen05.mma.cta_group::1.kind::f16"}


def assemble(cards, shapes):
    """One report a card and shape: what XLA says, and the PTX and ptxas messages of the attention and join kernels.

    The cards must share an architecture: a process assembles for the first one it meets.
    """
    env = dict(os.environ, MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_PTX="1", PYTHONPATH=str(ROOT))
    command = [sys.executable, str(Path(__file__).with_name("assemble.py")), *cards, "/", *shapes]
    run = subprocess.run(command, env=env, capture_output=True, timeout=900, cwd=ROOT)
    output = (run.stdout + run.stderr).decode(errors="replace")
    if "No module named 'jax_plugins" in output or "needs jax's CUDA plugin" in output:
        pytest.skip("compiling for a GPU needs jax's CUDA plugin")
    assert run.returncode == 0, output[-3000:]
    sections = re.split(r"^=== (\w+) (\S+)$", run.stdout.decode(errors="replace"), flags=re.M)[1:]
    return {(card, name): text for card, name, text in zip(sections[::3], sections[1::3], sections[2::3], strict=True)}


def check(card, name, text, *, first):
    kernel, _ = CARDS[card]
    shape = SHAPES[name]
    report = json.loads(re.search(r"^REPORT (.*)$", text, re.M).group(1))
    assert report["implementation"] == kernel
    # A kernel that the process has assembled before, for a card of the same architecture, is not assembled again.
    assert not first or "Compiling entry function" in text
    if "Compiling entry function" in text:
        check_kernels(card, shape, report, text)

    # No copy of the cache: XLA copies nothing, and what it allocates is partial results, padding and tables.
    assert report["copies"] == []
    padded = (-(-shape.rows * shape.heads // 64) + 1) * 64
    results = shape.requests * padded * (2 * shape.kv_lora_rank + 4)
    partials = 2 * report["splits"] * padded * (4 * shape.kv_lora_rank + 4) * (report["splits"] > 1)
    queries = 2 * shape.requests * padded * (shape.kv_lora_rank + shape.rope)
    assert report["temporary_bytes"] < results + partials + queries + 2**20
    if shape.cache_bytes > 2**28:
        assert report["temporary_bytes"] < shape.cache_bytes


def check_kernels(card, shape, report, text):
    kernel, architecture = CARDS[card]
    entry = f"tree_attention_{kernel}_mosaic_gpu_kernel"
    assert re.search(rf"Compiling entry function '{entry}' for '{architecture}'", text)
    spills = dict(re.findall(r"Function properties for (\w+)\s.*?(\d+) bytes spill stores", text, re.S))
    assert int(spills[entry]) <= SPILLED_BYTES
    assert all(int(registers) <= 255 for registers in re.findall(r"Used (\d+) registers", text))
    if report["splits"] > 1:
        assert int(spills["tree_attention_join_mosaic_gpu_kernel"]) == 0

    ptx = text[text.index(f".visible .entry {entry}") : text.index("Compiling entry function")]
    assert TENSOR_CORE[kernel] in ptx
    assert "cp.async.bulk.tensor" in ptx
    shared_copies = kernel == "hopper" and shape.rows * shape.heads > 64
    assert ("multicast::cluster" in ptx) == shared_copies
    if kernel == "hopper":
        check_wgmma_order(ptx)


def check_wgmma_order(ptx):
    """The interpreter's wgmma is synchronous: see in the PTX that each is waited for before the barrier that follows,

    and that stores to shared memory which the tensor core reads are fenced before their barrier.
    """
    started = waited = False
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            started = True
        elif "wgmma.wait_group.sync.aligned 0" in line:
            waited |= started
            started = False
        elif "mbarrier.arrive" in line:
            assert not started, "a barrier is arrived at while a product that reads its tile is in flight"
    assert waited
    # One hand-over of probabilities in the unmasked and one in the masked loop.
    handovers = re.findall(r"fence\.proxy\.async\S*;\s.*?bar\.sync.*?mbarrier\.arrive", ptx, re.S)
    assert len(handovers) == 2


@pytest.mark.parametrize("cards", [("h100", "h200"), ("b200", "gb200"), ("b300", "gb300")], ids="-".join)
def test_33_rows_of_64_heads_are_assembled(cards):
    for (card, name), text in assemble(cards, ["dp-tree33"]).items():
        check(card, name, text, first=card == cards[0])


@pytest.mark.slow
@pytest.mark.parametrize("card", ["h200", "gb300"])
def test_every_named_shape_is_assembled(card):
    for (_, name), text in assemble([card], SHAPES).items():
        check(card, name, text, first=name == next(iter(SHAPES)))
