"""72 simulated CPU devices for every test, and the tiny checkpoint opened on any preset's mesh."""

import os

# Before any test module touches JAX: the plugin registers without a driver, and the platform is the CPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
# The interpreter runs every simulated warp and warpgroup on a thread of XLA's pool and blocks it on barriers: with as
# many threads as a small machine has cores it starves.
os.environ.setdefault("NPROC", "16")
# Up to 72 simulated devices block one each besides, while the rank before them is in the interpreter.
os.environ.setdefault("PJRT_NPROC", "160")
# Simulated ranks take turns in the interpreter (test_in_model.py); the first may wait long for the last at a sum, where
# XLA would end the process after 40 seconds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_warn_stuck_timeout_seconds=1200"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=1800"
)

import atexit
import dataclasses
import functools
import io
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file

from kimi_jax import commands, compilation_cache
from kimi_jax.decoding.engine import Engine
from kimi_jax.decoding.generate import Progress, Request, generate, shape_of
from kimi_jax.decoding.loading import model_for, open_checkpoint
from kimi_jax.decoding.programs import Programs
from kimi_jax.decoding.queue import Queue
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.decoding.session import Session
from kimi_jax.model.rows import Rows
from kimi_jax.model.transformer import Output
from kimi_jax.parallel.collectives import all_gather
from kimi_jax.parallel.sharding import REQUESTS
from kimi_jax.parameters import bind, specs
from meshes.devices import build_mesh
from meshes.presets import preset
from pallas_kernels.tree_attention import PAGE

jax.config.update("jax_num_cpu_devices", 72)
assert len(jax.devices()) == 72  # started now: a test that opens a smaller machine would start fewer for all
# Most of a test's time is compiling, and what is compiled computes little. Commands in processes of their own compile
# as a user's do.
jax.config.update("jax_disable_most_optimizations", True)

if "PYTEST_XDIST_WORKER" not in os.environ:  # a run's processes and commands share what they compile, in a folder
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="kimi_jax_tests_")  # that goes with the run
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
compilation_cache.switch(True)

TESTS = Path(__file__).parent
DATA = TESTS / "data"

CHECKPOINT, DRAFTER = DATA / "tiny_random", DATA / "tiny_random_drafter"

MESHES = {
    "local": preset("local"),
    "hgx-ib-16": preset("hgx-ib-16"),
    "hgx-ib-16 replicas": preset("hgx-ib-16").with_axes(dp=2, ep=1, tp=8),
    "hgx-ib-16 wide ep": preset("hgx-ib-16").with_axes(dp=1, ep=16, tp=1),
    "nvl36": preset("nvl36"),
    "nvl72": preset("nvl72"),
    "nvl72 ep 72": preset("nvl72").with_axes(dp=1, ep=72, tp=1),
    "nvl72 dp 9": preset("nvl72").with_axes(dp=9, ep=1, tp=8),
}
for name in ("hgx-ib-16", "hgx-ib-16 replicas", "nvl36", "nvl72"):
    MESHES[f"{name} split cache"] = MESHES[name].with_layout(dataclasses.replace(MESHES[name].layout, cache="split"))


LONGEST = (
    "decoding/test_speculation.py", "decoding/test_queue.py", "pallas_kernels/test_operation.py",
    "decoding/test_generate.py", "scripts/test_decode.py", "parallel/test_exchange.py", "profiling/test_compile.py",
    "ddtree/test_tree.py", "estimator/test_estimate_cli.py", "test_public_api.py",
)  # fmt: skip
"""Files that run for 20 seconds and more."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first: at the end of a run no process is left with one of them while the other idles."""
    order = {TESTS / name: place for place, name in enumerate(LONGEST)}
    assert all(map(Path.exists, order)), "LONGEST names a file that is gone"
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def reference() -> dict[str, np.ndarray]:
    return load_file(TESTS / "data" / "reference.safetensors")


@pytest.fixture(scope="session")
def engines():
    """Engines by mesh name and type, opened once."""
    opened: dict[tuple, Engine] = {}

    def engine(
        mesh: str = "local", dtype: str = "float32", checkpoint: Path = CHECKPOINT, drafter: Path | None = DRAFTER
    ) -> Engine:
        key = (mesh, dtype, checkpoint)
        if key not in opened:
            machine = MESHES[mesh]
            devices = build_mesh(machine, jax.devices())
            opened[key] = open_checkpoint(checkpoint, devices, machine.layout, jnp.dtype(dtype), drafter)
        return opened[key]

    return engine


@pytest.fixture(scope="session")
def shallow(engines):
    """The tiny engine on a mesh with two of its layers, one of each kind, and a drafter of one layer that sees both.

    Its programs compile in half the time: for tests that compare an engine's texts with its own.
    """

    @functools.cache
    def engine(mesh: str = "local") -> Engine:
        whole = engines(mesh)
        config, drafter = dataclasses.replace(whole.config, num_hidden_layers=2), whole.drafter.config
        assert config.first_k_dense_replace == 1
        drafter = dataclasses.replace(drafter, num_hidden_layers=1, num_target_layers=2, target_layer_ids=(0, 1))
        parameters = jax.tree.map(lambda x: x, whole.parameters)
        for layers, count in ((parameters["target"]["model"]["layers"], 2), (parameters["drafter"]["layers"], 1)):
            for number in [*layers][count:]:
                del layers[number]
        fuse = parameters["drafter"]["fc"]
        fuse["weight"] = fuse["weight"][:, : 2 * config.hidden_size]
        model, drafter = model_for(config, whole.layout), type(whole.drafter)(drafter)
        return dataclasses.replace(whole, model=model, drafter=drafter, parameters=parameters)

    return engine


@dataclasses.dataclass(frozen=True)
class Forward:
    """One forward's outputs on the host, for the real requests only."""

    logits: np.ndarray
    output: Output


@functools.cache
def compiled_forward(model, mesh, rules, taps, expanded, cached):
    def forward(parameters, rows, cache=None):
        bound = bind(model, parameters)
        output = bound.model(rows, cache, taps, expanded)
        return all_gather(bound.logits(output.hidden), "tp", dimension=2), output

    in_specs = (specs(model, dict(rules)), REQUESTS, *[REQUESTS] * cached)
    return jax.jit(jax.shard_map(forward, mesh=mesh, in_specs=in_specs, out_specs=REQUESTS, check_vma=False))


def run_forward(engine: Engine, rows: Rows, cache=None, *, taps=(), expanded=None) -> Forward:
    """Runs the model on rows given for the whole batch; requests are padded to the mesh.

    A cache is given as [requests, positions, …]; it is put into pages here.
    """
    count = rows.tokens.shape[0]
    multiple = engine.mesh.shape["dp"] * engine.mesh.shape["ep"]
    padded = -(-count // multiple) * multiple

    def place(x):
        padding = [(0, padded - count), *[(0, 0)] * (x.ndim - 1)]
        return jax.device_put(np.pad(np.asarray(x), padding), NamedSharding(engine.mesh, REQUESTS))

    given = [jax.tree.map(place, rows)]
    if cache is not None:
        tiles = -(-cache[0].latent.shape[1] // PAGE)
        pages = np.arange(padded) % (padded // multiple) * tiles
        given = [dataclasses.replace(given[0], pages=place((pages[:, None] + np.arange(tiles)).astype(np.int32)))]

        def in_pages(x):
            x = np.pad(np.asarray(x), [(0, padded - count), (0, tiles * PAGE - x.shape[1]), (0, 0)])
            return jax.device_put(x.reshape(-1, PAGE, x.shape[-1]), NamedSharding(engine.mesh, REQUESTS))

        given.append(jax.tree.map(in_pages, cache))
    run = compiled_forward(engine.model, engine.mesh, tuple(engine.rules.items()), taps, expanded, cache is not None)
    with jax.default_matmul_precision("highest"):
        logits, output = run(engine.parameters["target"], *given)
    return Forward(np.asarray(logits)[:count], jax.tree.map(lambda x: np.asarray(x)[:count], output))


@pytest.fixture(scope="session")
def forward():
    return run_forward


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended, and what it had printed."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command of `kimi-jax` with arguments from the project's folder, in this process: it need not import jax
    and start devices for each test."""

    def run(name: str, *arguments: object, stdin: str = "", expect: int = 0) -> Ended:
        monkeypatch.chdir(TESTS.parent)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        cached, status = jax.config.jax_enable_compilation_cache, 0
        capsys.readouterr()
        try:
            commands.run(name, [str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code or 0
        finally:
            jax.config.update("jax_enable_compilation_cache", cached)  # --no-cache is this command's alone
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert status == expect, err
        return Ended(status, out, err)

    return run


GREEDY = Sampling()


@dataclasses.dataclass(frozen=True)
class Served:
    """What requests got of programs: their texts, and the last that was told of them."""

    texts: list[list[int]]
    last: Progress


def run_served(
    engine: Engine, programs: Programs, prompts, limits, *, sampling=GREEDY, seed=0, samples=None, stop_ids=None
) -> Served:
    """Decodes prompts with programs of a test's own."""
    count = len(prompts)
    seeds = [seed] * count if isinstance(seed, int) else seed
    requests = [
        Request(ids, sampling, one, most, sample)
        for ids, one, most, sample in zip(prompts, seeds, limits.of_each(count), samples or [0] * count, strict=True)
    ]
    shape = shape_of(programs, [*map(len, prompts)], limits.of_each(count), limits)
    queue = Queue(Session(programs, engine.parameters, shape), rebalancer=engine.rebalancer)
    texts, last = [[] for _ in prompts], None
    for last in generate(queue, requests, engine.stop_ids if stop_ids is None else stop_ids):
        for row, new in enumerate(last.new_tokens):
            texts[row] += new
    assert last is not None
    return Served(texts, last)


@pytest.fixture(scope="session")
def served():
    return run_served
