"""Look at, check and convert checkpoints.

Examples:
  uv run scripts/convert.py plan --checkpoint DIR --mesh nvl72 --processes 18
  uv run scripts/convert.py to-orbax --checkpoint DIR --output SHARDED
  uv run scripts/convert.py to-hf --checkpoint SHARDED --output DIR
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kimi_jax.checkpoint import hub
from kimi_jax.commands.options import Checkpoint, CheckpointOptions, Json, OptionalFile, dispatch
from kimi_jax.commands.progress import on_disk
from kimi_jax.config import ModelConfig
from kimi_jax.opening import BUNDLED_CHECKPOINT
from kimi_jax.tables import right, show, table
from meshes.devices import build_mesh, simulate

GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(CheckpointOptions):
    """Options of `plan`."""

    processes: int = 1
    """Processes that share the mesh's devices equally: one a node, usually."""
    bandwidth: float = 2.0
    """GB/s that one process reads from storage, for the seconds column."""
    json: Json = False


def run_plan(options: PlanOptions) -> None:
    """Show what each process would read and hold, from the headers alone; nothing else is read. Of a name on the hub
    only config.json and the index are fetched: shapes are then the configuration's, dense weights bfloat16."""
    status = Console(stderr=True, soft_wrap=True)
    machine = options.layout.preset()
    named = hub.is_name(options.checkpoint)
    folder = on_disk(options.checkpoint, status, outline=True)
    config = ModelConfig.from_json(folder)
    mesh = build_mesh(machine, simulate(machine.layout.num_devices))
    import jax.numpy as jnp

    from kimi_jax.checkpoint.plan import declared_tensors, plan, split_processes
    from kimi_jax.checkpoint.safetensors import open_checkpoint
    from kimi_jax.decoding.loading import model_for
    from kimi_jax.parallel.sharding import rules

    started = time.perf_counter()
    model = model_for(config, machine.layout)
    if named:
        tensors, total = declared_tensors(
            folder, model, config.key_prefix, dtype="bfloat16", num_experts=config.n_routed_experts
        )
    else:
        tensors = open_checkpoint(folder)
        total = sum(tensor.nbytes for tensor in tensors.values())
    matched = plan(
        tensors, model, config.key_prefix, mesh, rules(machine.layout),
        dtype=jnp.dtype("bfloat16" if options.dtype == "auto" else options.dtype),
        num_experts=config.n_routed_experts, slot_experts=model.placement.slot_experts,
        process_of=split_processes(mesh, options.processes),
    )  # fmt: skip
    read = {process: matched.read_bytes(process) for process in matched.processes}
    seconds = time.perf_counter() - started
    device_bytes = {device.id: size for device, size in matched.device_bytes().items()}
    per_process = len(device_bytes) // options.processes
    summary = {
        "tensors": len(tensors),
        "tensor_bytes": total,
        "skipped_tensors": len(matched.skipped),
        "skipped_bytes": total - sum(t.nbytes for t in tensors.values()) + sum(t.nbytes for t in matched.skipped),
        "files": len({tensor.file for tensor in tensors.values()}),
        "mesh": machine.name,
        "layout": str(machine.layout),
        "plan_seconds": round(seconds, 2),
        "device_bytes": list(device_bytes.values()),
        "read_bytes": list(read.values()),
        "largest_array_bytes": [matched.largest(process) for process in matched.processes],
    }
    if options.json:
        print(json.dumps(summary))
        return
    _print_plan(summary, per_process, options.bandwidth)


def _print_plan(summary: Mapping[str, Any], per_process: int, bandwidth: float) -> None:
    rows = []
    for process, (read, largest) in enumerate(zip(summary["read_bytes"], summary["largest_array_bytes"], strict=True)):
        first = process * per_process
        devices = f"{first}–{first + per_process - 1}" if per_process > 1 else str(first)
        sizes = (f"{read / GB:,.3f}", f"{largest / GB:,.3f}", f"{read / GB / bandwidth:,.0f}")
        rows.append((str(process), devices, *sizes))
    sizes = summary["device_bytes"]
    columns = right("process", "devices", "reads GB", "largest array GB", f"seconds at {bandwidth:g} GB/s")
    seen = f"; {summary['skipped_tensors']} of them, {summary['skipped_bytes'] / GB:,.3f} GB, are for vision"
    show(
        f"{summary['tensors']:,} tensors in {summary['files']} files, {summary['tensor_bytes'] / GB:,.3f} GB"
        + (f"{seen}: every device and process has them besides" if summary["skipped_tensors"] else ""),
        f"{summary['mesh']}: {summary['layout']}; {_range(sizes)} GB of weights on each of {len(sizes)} devices; "
        f"planned in {summary['plan_seconds']:.1f} s",
        table("", columns, rows),
    )


def _range(sizes: list[int]) -> str:
    low, high = min(sizes) / GB, max(sizes) / GB
    return f"{low:,.3f}" if low == high else f"{low:,.3f} to {high:,.3f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `to-orbax` and `to-hf`."""

    checkpoint: Checkpoint = BUNDLED_CHECKPOINT
    output: Path
    """Folder to create; it appears when it is complete."""
    workers: int = 8
    """Reading threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToOrbaxOptions(ConvertOptions):
    """Options of `to-orbax`."""

    placement: OptionalFile = None
    """JSON file that says which experts lie where, as decode.py --save-placement writes; it is kept with the weights
    and holds wherever as many ranks can share its slots. By default every expert once, in order."""


def run_to_orbax(options: ToOrbaxOptions) -> None:
    """Write an HF checkpoint as a sharded one, a layer in memory at a time; needs no GPU."""
    with _conversion(options) as (source, config, progress):
        from kimi_jax.checkpoint.convert import to_orbax
        from kimi_jax.model.transformer import CausalLM
        from kimi_jax.parallel.eplb import load_placements

        experts, layers = config.n_routed_experts, config.num_moe_layers
        placements = None
        if options.placement is not None:
            placements = load_placements(options.placement, layers=layers, num_experts=experts, ranks=1)
        model = CausalLM(config, placements)
        to_orbax(
            source, options.output, model, config.key_prefix, num_experts=experts, dtype="bfloat16",
            slot_experts=model.slot_experts, progress=progress, workers=options.workers,
        )  # fmt: skip


def run_to_hf(options: ConvertOptions) -> None:
    """Write a sharded checkpoint in the HF layout, tensors byte-identical; needs no GPU."""
    with _conversion(options) as (source, config, progress):
        from kimi_jax.checkpoint.convert import to_huggingface
        from kimi_jax.model.transformer import CausalLM

        to_huggingface(
            source, options.output, CausalLM(config), config.key_prefix,
            num_experts=config.n_routed_experts, progress=progress, workers=options.workers,
        )  # fmt: skip


@contextlib.contextmanager
def _conversion(options: ConvertOptions) -> Iterator[tuple[Path, ModelConfig, Callable[[int, int], None]]]:
    """The folder, the model's configuration and a progress bar for a conversion on this machine's CPU."""
    status = Console(stderr=True, soft_wrap=True)
    columns = (
        TextColumn("reading {task.fields[name]}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    source = on_disk(options.checkpoint, status)
    config = ModelConfig.from_json(source)
    simulate(1)
    started = time.perf_counter()
    with Progress(*columns, console=status, transient=True) as bar:
        task = bar.add_task("read", total=None, name=options.checkpoint.name)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield source, config, progress
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    seconds = time.perf_counter() - started
    status.print(f"{options.output}: {size / GB:,.3f} GB in {seconds:,.1f} s", style="dim", highlight=False)


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    dispatch({"plan": run_plan, "to-orbax": run_to_orbax, "to-hf": run_to_hf}, args, prog, __doc__)
