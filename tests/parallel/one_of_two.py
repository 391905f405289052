"""One of two processes with four CPU devices each: `one_of_two.py INDEX PORT FOLDER`; see test_processes.py."""

import json
import os
import signal
import sys
import zlib
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from safetensors.numpy import load_file

from kimi_jax.checkpoint import safetensors, writer
from kimi_jax.checkpoint.sharded.manifest import copyable_files
from kimi_jax.checkpoint.sharded.reader import Reader
from kimi_jax.checkpoint.sharded.writer import save
from kimi_jax.commands.errors import errors_in_one_line
from kimi_jax.commands.options import EngineOptions, LayoutOptions
from kimi_jax.commands.progress import open_engine
from kimi_jax.decoding.engine import Draft, Engine
from kimi_jax.decoding.generate import Limits, Request, settings_of
from kimi_jax.decoding.loading import open_checkpoint
from kimi_jax.decoding.sampling import Sampling
from kimi_jax.parallel import host_arrays, processes
from kimi_jax.parallel.processes import ProcessOptions
from kimi_jax.serving import plan
from kimi_jax.serving.transport import Sender, connect
from kimi_jax.vision.media import Medium
from meshes.presets import preset

CHECKPOINT = Path(__file__).parents[1] / "data" / "tiny_random"
DRAFTER = CHECKPOINT.with_name("tiny_random_drafter")
MESH, AXES = "local", {"dp": 1, "ep": 2, "tp": 4}
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [30, 31]]
"""One more than ep, so that a request is padding."""
NEW_TOKENS = 12


def shards(engine: Engine) -> dict[str, int]:
    """CRC-32 of every part of every array by array and device, of this process's devices."""
    order = {device: number for number, device in enumerate(engine.mesh.devices.flat)}
    return {
        f"{jax.tree_util.keystr(path)} on {order[shard.device]}": zlib.crc32(np.asarray(shard.data).tobytes())
        for path, array in jax.tree_util.tree_leaves_with_path(engine.parameters["target"])
        for shard in array.addressable_shards
    }


def read(checkpoint: Path, mesh: jax.sharding.Mesh) -> Engine:
    return open_checkpoint(checkpoint, mesh, preset(MESH).with_axes(**AXES).layout, "bfloat16")


def texts(engine: Engine, draft: Draft) -> list[list[int]]:
    """Tokens that follow the prompts."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for progress in engine.generate(PROMPTS, Limits(NEW_TOKENS), Sampling(), draft=draft):
        for text, new in zip(tokens, progress.new_tokens, strict=True):
            text += new
    return tokens


def checkpoints(mesh: jax.sharding.Mesh, folder: Path) -> dict:
    """Reads the checkpoint, writes it in both forms and reads the sharded one; tells what was read and what it is."""
    ranges: list[tuple[str, int, int]] = []
    chunks: list[tuple[str, list[int]]] = []
    read_into, fill = safetensors.Files.read_into, Reader._fill

    def recording_read(self, tensor, offset, target):
        ranges.append((tensor.name, offset, offset + target.nbytes))
        read_into(self, tensor, offset, target)

    def recording_fill(self, store, name, stored, chunk, targets):
        chunks.append((name, list(chunk)))
        fill(self, store, name, stored, chunk, targets)

    safetensors.Files.read_into, Reader._fill = recording_read, recording_fill
    engine = read(CHECKPOINT, mesh)
    slots = engine.model.slot_experts
    own = engine.parameters["target"]
    save(
        folder / "sharded", own, engine.model, dtype="bfloat16", slot_experts=slots,
        extra_files=copyable_files(CHECKPOINT),
    )  # fmt: skip
    writer.save(
        folder / "written", own, engine.model, {}, engine.config.key_prefix, dtype="bfloat16",
        num_experts=engine.config.n_routed_experts, slot_experts=slots,
    )  # fmt: skip
    again = read(folder / "sharded", mesh)
    return {"ranges": ranges, "shards": shards(engine), "restored": shards(again), "chunks": chunks}


def disagreements(mesh: jax.sharding.Mesh) -> list[str]:
    """Messages of what is refused."""
    messages = []
    local = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    for refused in (
        lambda: host_arrays.require_agreement("prompts", f"prompt of {jax.process_index()}"),
        lambda: host_arrays.require_devices(local),
    ):
        try:
            refused()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    host_arrays.require_agreement("prompts", "the same")
    host_arrays.require_devices(mesh)
    return messages


def messages_of_process_0() -> list[str]:
    """What reaches this process beside the devices' collectives."""
    index, count, host = jax.process_index(), jax.process_count(), processes.coordinator_host()
    side = connect(index, count, host, host_arrays.bytes_of_process_0)
    if isinstance(side, Sender):
        for message in ("a plan", "", "another"):
            side.send(message)
        side.close()
        return []
    return list(iter(side.receive, None))


def served(engine: Engine) -> list[list[int]]:
    """Tokens that follow the prompts where process 0 alone knows them: they come one after the other."""
    queue = engine.queue(2, 64, Limits(rounds_per_dispatch=2), Draft("ddtree", 6))
    if jax.process_index():
        queue.follow()
        return []
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for index, (prompt, settings) in enumerate(zip(PROMPTS, settings_of(requests(), engine.stop_ids), strict=True)):
        queue.submit(plan.Request(str(index), tuple(prompt), NEW_TOKENS, settings))
        for event, _ in [*queue.step(), *queue.step()]:
            tokens[int(event.id)] += event.tokens
        queue.rest()
    while not queue.idle:
        for event, _ in queue.step():
            tokens[int(event.id)] += event.tokens
    queue.close()
    return tokens


def requests() -> list[Request]:
    """Of all prompts."""
    return [Request(prompt, Sampling(), 0, NEW_TOKENS) for prompt in PROMPTS]


def with_pictures() -> list[Request]:
    """Prompts with two pictures each, one for each group of ranks."""
    stored = load_file(CHECKPOINT.with_name("vision_reference.safetensors"))
    grids, ends = stored["prompt_grids"], np.cumsum(stored["prompt_grids"].prod(1))[:-1]
    media = [
        Medium(*pair) for pair in zip(np.split(stored["prompt_patches"], ends), map(tuple, grids.tolist()), strict=True)
    ]
    inverted = [Medium(255 - medium.patches, medium.grid) for medium in media]
    ids = stored["prompt_ids"][0].tolist()
    return [Request(ids, Sampling(), 0, NEW_TOKENS, media=tuple(own)) for own in (media, inverted)]


def seen(engine: Engine, draft: Draft) -> list[list[int]]:
    """Tokens that follow prompts with pictures."""
    tokens: list[list[int]] = [[], []]
    for progress in engine.serve(with_pictures(), Limits(NEW_TOKENS), draft):
        for text, new in zip(tokens, progress.new_tokens, strict=True):
            text += new
    return tokens


def seen_by_followers(engine: Engine) -> list[list[int]]:
    """The same where process 0 alone has the pictures."""
    queue = engine.queue(2, 64, Limits(rounds_per_dispatch=2), Draft("ddtree", 6))
    if jax.process_index():
        queue.follow()
        return []
    tokens: list[list[int]] = [[], []]
    asked = with_pictures()
    for index, (each, settings) in enumerate(zip(asked, settings_of(asked, engine.stop_ids), strict=True)):
        ids, media = queue.session.placed(each.ids, each.media)
        queue.submit(plan.Request(str(index), tuple(ids), NEW_TOKENS, settings, media=media))
    while not queue.idle:
        for event, _ in queue.step():
            tokens[int(event.id)] += event.tokens
    queue.close()
    return tokens


def run_until_killed(mesh: jax.sharding.Mesh) -> None:
    """Sums over both processes for ever; process 1 is killed after a few sums."""
    values = host_arrays.place(np.arange(8.0), mesh, PartitionSpec(("dp", "ep", "tp")))
    total = jax.jit(lambda x: x.sum(), out_shardings=jax.sharding.NamedSharding(mesh, PartitionSpec()))
    step = 0
    while True:
        assert float(total(values)) == 28
        step += 1
        if step == 3 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main(index: int, port: int, folder: Path) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    several = ProcessOptions(f"localhost:{port}", 2, index, init_timeout=100, heartbeat_timeout=10)
    status = Console(stderr=True)
    with errors_in_one_line(status):
        options = EngineOptions(checkpoint=CHECKPOINT, layout=LayoutOptions(MESH, **AXES), processes=several)
        engine = open_engine(options, status, DRAFTER).engine
        result = {
            "disagreements": disagreements(engine.mesh),
            "messages": messages_of_process_0(),
            "texts": texts(engine, Draft("ddtree", 6)),
            "served": served(engine),
            "seen": seen(engine, Draft("ddtree", 6)),
            "seen_by_followers": seen_by_followers(engine),
            **checkpoints(engine.mesh, folder),
        }
        (folder / f"{index}.json").write_text(json.dumps(result))
        print(f"process {index} speaks", flush=True)
        run_until_killed(engine.mesh)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
