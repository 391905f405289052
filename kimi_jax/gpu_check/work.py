"""What the processes of the check do. A function prints its verdicts as it goes: what came before a hang is kept."""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kimi_jax.doctor import examine, gather
from kimi_jax.gpu_check.steps import say
from meshes.hardware import card_of, gpu
from pallas_kernels import benchmark, rates
from pallas_kernels.alternatives import ALTERNATIVES
from pallas_kernels.operation import Case, Device, Trial, self_check
from pallas_kernels.registry import OPERATIONS

REPEATS = 200
"""Runs that must give the same bits."""
LEAST_OF_COPY, LEAST_OF_TENSOR = 0.75, 0.5
"""Of the data sheet: what a healthy card's copy and matrix product reach."""
SLOWEST = 2.0
"""Times of the model that a kernel may take."""
MOST_BELOW = 0.2
"""Standard deviations of a row's logits by which tokens may be below the references' own choice on average. Rounding
alone gives 0.02: where it moves a row to another expert, a single token may be 0.5 below."""
OVERHEAD_US = {"int4_moe": 20.0, "tree_attention": 12.0}
"""What the small programs around the kernels of a call cost."""


def card() -> None:
    """Driver, assembler, clocks, and the rates of memory and tensor cores beside the data sheet's."""
    facts, device = gather(), Device.current()
    found = [f"{finding.what}: {finding.fix}" for finding in examine(facts) if finding.level == "fault"]
    where = f"{device.kind}, driver {facts.driver}, ptxas {facts.ptxas}, {clocks()}"
    say("", not found, "; ".join(found) or where, kind=device.kind, driver=facts.driver, ptxas=facts.ptxas)
    by = "CUPTI, kernel by kernel" if benchmark.clock() == "CUPTI" else "the host's clock: CUPTI does not answer"
    say("times", None, f"taken by {by}")
    sheet = card_of(device.kind)
    copy = benchmark.copy_bytes_per_s(10)
    share = copy / sheet.hbm_bytes_per_s if sheet else None
    of = "" if share is None else f", {share:.0%} of the data sheet"
    say("memory copy", share is None or share >= LEAST_OF_COPY, f"{copy / 1e12:.2f} TB/s{of}", bytes_per_s=copy)
    size = 8192
    square = jnp.ones((size, size), jnp.bfloat16)
    rate = rates.matmul_operations_per_s(benchmark.median_seconds(jax.jit(jnp.dot), square, square, repeats=10), size)
    share = rate / sheet.bf16_flops_per_s if sheet else None
    of = "" if share is None else f", {share:.0%} of the data sheet"
    say("tensor core", share is None or share >= LEAST_OF_TENSOR, f"{rate / 1e12:.0f} TFLOP/s{of}", per_s=rate)
    trips = 2000
    program = jax.jit(lambda: rates.mma_sync(device.cores, trips))
    right = bool(jnp.all(program() == 64.0 * trips))
    rate = rates.mma_sync_operations(device.cores, trips) / benchmark.median_seconds(program, repeats=10)
    say("mma.sync", right, f"{rate / 1e12:.0f} TFLOP/s" if right else "wrong sums", per_s=rate)


def clocks() -> str:
    """Clocks, power limit and temperature as nvidia-smi has them."""
    fields = "clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "clocks unknown"
    return "clock {}, of {}, memory {}, limit {}, {} °C".format(*said.split(", "))


def checks() -> None:
    """What is run whenever a checkpoint is opened."""
    for operation in OPERATIONS.values():
        started = time.perf_counter()
        done = self_check(operation)
        seconds = time.perf_counter() - started
        say(operation.name, bool(done) and seconds < 10, f"{len(done)} cases in {seconds:.1f} s", seconds=seconds)


def kernel(operation: str, shape: str, plain: bool) -> None:
    """What "auto" takes at a named shape: its values, the same bits again and again, and its time."""
    known, device = OPERATIONS[operation], Device.current()
    trial = Trial(known, shape, Case(known.shapes[shape]), device).compile()
    if trial.choice.config is None:
        say("", False, trial.choice.reason)
        return
    try:
        figures = [vars(difference) for difference in trial.compare().differences]
    except RuntimeError as error:
        say("values", False, str(error))
        return
    figure = f"{trial.choice.implementation}, error {figures[0]['frobenius']:.1e}"
    say("values", True, figure, differences=figures, reason=trial.choice.reason)
    first = jax.tree.leaves(trial.run(*trial.arguments))
    same = jax.jit(lambda a, b: jnp.stack([jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)]).all())
    apart = sum(not same(first, jax.tree.leaves(trial.run(*trial.arguments))) for _ in range(REPEATS))
    say("repeats", not apart, f"{apart} of {REPEATS} differ" if apart else f"{REPEATS} runs, the same bits")
    sheet = card_of(device.kind)
    copy = benchmark.copy_bytes_per_s(5)

    def ours(*arguments):
        return known.run(trial.choice, *arguments)

    timing = benchmark.measure(ours, known, shape, sheet, copy, 10)
    model = OVERHEAD_US[operation] + timing.us * max(timing.of_copy, timing.of_floor or 0.0)
    figure = f"{timing.us:.0f} µs, {timing.of_copy:.0%} of copy, {timing.us / model:.1f} × the model"
    say("time", timing.us <= SLOWEST * model, figure, model_us=model, clock=benchmark.clock(), **vars(timing))
    if plain:
        other = benchmark.measure(ALTERNATIVES[operation], known, shape, sheet, copy, 3)
        say("plain jax", timing.us < other.us, f"{other.us:.0f} µs", **vars(other))


def rehearse(operation: str, card: str) -> None:
    """A card's kernels on the small table, in Mosaic's interpreter with race detection."""
    for done in benchmark.rehearse(gpu(card), OPERATIONS[operation]):
        figures = [vars(difference) for difference in done.differences]
        figure = f"error {figures[0]['frobenius']:.1e}, no race"
        say(f"{done.choice.implementation}, {done.case}", True, figure, differences=figures)


def random_round(layers: int) -> None:
    """A round of K2.6's first layers with random weights: its time, and how XLA cuts it into graphs."""
    from kimi_jax.gpu_check.round import measure

    found = measure(layers)
    seconds = found.pop("seconds")
    graphs = ", ".join(f"{count} {name}" for name, count in found["thunks"].items())
    figure = f"{seconds * 1e3:.2f} ms for {layers} layers, {found['experts']}, {found['attention']}"
    say("", found["finite"], f"{figure}; {graphs}", seconds=seconds, **found)


def compiled_round(card: str, layers: int) -> None:
    """The same round compiled for a card that is not here."""
    from kimi_jax.gpu_check.round import compiled

    found = compiled(card, layers)
    graphs = ", ".join(f"{count} {name}" for name, count in found["thunks"].items())
    kernels = found["kernels"]
    figure = f"{len(kernels)} kernels, {found['temporary_bytes'] / 1e9:.2f} GB of temporaries; {graphs}"
    wanted = ("int4_gate_up", "int4_down", "tree_attention")
    say("", all(any(name.startswith(want) for name in kernels) for want in wanted), figure, **found)


def text() -> None:
    """Greedy text: the bundled model's is the same plain and drafted, a fitting model's what the references choose."""
    from kimi_jax.gpu_check.text import bundled_texts, fitting_texts

    for prompt, plain, drafted in bundled_texts():
        how = "the same" if plain == drafted else "otherwise"
        say(prompt, plain == drafted and bool(plain), f"{len(plain)} tokens, drafted {how}")
    for name, picks, below in fitting_texts():
        served = Device.current().architecture is None or all(pick.implementation != "reference" for pick in picks[:2])
        good = served and below.size > 0 and bool(below.mean() <= MOST_BELOW)
        by, same = " and ".join(map(str, picks[:2])), f"{(below == 0).sum()} of {below.size} tokens"
        figure = f"{same} are the references', the mean {below.mean():.3f} σ below; {by}"
        say(f"fitting model, {name}", good, figure, below=below.tolist())


WORK: dict[str, Callable[..., None]] = {
    function.__name__: function for function in (card, checks, kernel, rehearse, random_round, compiled_round, text)
}

if __name__ == "__main__":
    WORK[sys.argv[1]](**json.loads(sys.argv[2]))
