"""What a result was obtained with: checkpoint, machine, layout, speculation, seed, code and versions."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_jax.decoding.engine import Draft
    from kimi_jax.opening import Opened

PACKAGES = ("kimi-jax", "jax", "jaxlib")
LOADED = ("lm_eval", "torch", "transformers")
"""Packages that count only where a run uses them."""
SAMPLE_BYTES = 1 << 16


def provenance(opened: "Opened", draft: "Draft | None" = None, seed: int | None = None) -> dict[str, Any]:
    """The record of one run, for `json.dumps`.

    Args:
      opened: the checkpoint on its mesh.
      draft: how it speculates; None where nothing is decoded.
      seed: of what is sampled; None where nothing is.
    """
    engine = opened.engine
    device = engine.mesh.devices.flat[0]
    return {
        "checkpoint": _folder(opened.folder),
        "drafter": None if opened.drafter is None else _folder(opened.drafter),
        "dtype": opened.dtype,
        "machine": opened.machine.name,
        "layout": dataclasses.asdict(engine.layout),
        "devices": f"{engine.mesh.size} × {device.device_kind}",
        "simulated": opened.simulated,
        "ran": opened.where,
        "speculation": None if draft is None else dataclasses.asdict(draft),
        "seed": seed,
        "host": f"{processor()}, {cores()} cores",
        "versions": versions(),
        "commit": commit(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _folder(folder: Path) -> dict[str, str]:
    return {"path": str(folder.resolve()), "fingerprint": fingerprint(folder)}


def fingerprint(folder: Path) -> str:
    """SHA-256 of a checkpoint's files: their names and sizes, small ones whole, of larger ones the beginning, the
    middle and the end, 64 KiB each. Copies have the same; hidden files and Markdown do not count."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        if path.suffix == ".md" or any(part.startswith(".") for part in name.parts):
            continue
        size = path.stat().st_size
        found.update(f"{name.as_posix()} {size}\n".encode())
        with path.open("rb") as stream:
            for start in {0, max(0, size // 2), max(0, size - SAMPLE_BYTES)} if size > 3 * SAMPLE_BYTES else {0}:
                stream.seek(start)
                found.update(stream.read(SAMPLE_BYTES if size > 3 * SAMPLE_BYTES else size))
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Of Python and of the packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *(name for name in LOADED if name in sys.modules)):
        try:
            found[name.replace("-", "_")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Of the checkout that this code is run from, with `+changes` where files differ from it; None without one."""
    root = Path(__file__).resolve().parents[1]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None

    def ask(*arguments: str) -> str:
        result = subprocess.run([git, "-C", str(root), *arguments], capture_output=True, text=True)
        return result.stdout.strip() if not result.returncode else ""

    changed = ask("status", "--porcelain", "--untracked-files=no")
    return ask("rev-parse", "HEAD") + ("+changes" if changed else "") or None


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """As Linux names it; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
