"""JAX's persistent compilation cache in the user's cache folder: a second start reads what the first compiled."""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

MAX_BYTES = 4 * 1024**3
"""Beyond it the programs that were not used for longest are removed, for each jaxlib and processor type."""
SHORTEST_SECONDS = 0.1
"""Programs compiled faster than this are not kept: reading them would take about as long."""


def processor_type() -> str:
    """The processor's architecture, with a hash of its name and instruction sets, which compiled programs use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [f"model name: {platform.processor()}"]
    told = [next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags", "Features")]
    return f"{platform.machine()}-{hashlib.sha256(''.join(told).encode()).hexdigest()[:8]}"


def folder() -> Path:
    """Where this jaxlib's programs for this processor are kept, below the user's cache folder as the XDG names it."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    caches = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    return caches / "kimi_jax" / "xla" / f"jaxlib-{importlib.metadata.version('jaxlib')}-{processor_type()}"


def switch(on: bool) -> None:
    """Switches the cache on or off for this process, before anything is compiled.

    A folder that JAX has been given otherwise (`JAX_COMPILATION_CACHE_DIR`) is used as it is configured, and one that
    cannot be written leaves the cache off.
    """
    import jax

    jax.config.update("jax_enable_compilation_cache", on)
    if not on or jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder(), os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SHORTEST_SECONDS)
