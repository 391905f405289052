"""Serve a checkpoint to clients of the OpenAI API: chat, completions, tools, streams, metrics.

Examples:
  uv run scripts/serve.py --instant
  uv run scripts/serve.py --checkpoint DIR --drafter DRAFTER --mesh nvl72 --host 0.0.0.0 --api-key-file key.txt
"""

import asyncio
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated

from rich.console import Console

from kimi_jax.commands.options import Count, Flag, OptionalFile, SpeculationOptions, option, parse
from kimi_jax.commands.progress import open_engine
from kimi_jax.opening import Opened
from kimi_jax.parallel import processes
from kimi_jax.text_files import read_text

SIMULATED_SLOTS = 8
"""Slots of a device group where CPU devices stand for GPUs and --slots does not say."""
NEEDED = ("starlette", "uvicorn", "prometheus_client", "pydantic")


@dataclasses.dataclass(frozen=True)
class Options(SpeculationOptions):
    """Options of serve.py."""

    host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """Address to listen on; the default is reached from this machine only, 0.0.0.0 from everywhere."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    name: Annotated[str | None, option("NAME")] = None
    """Name of the model that clients ask for; by default the checkpoint's."""
    api_key: Annotated[str | None, option("KEY")] = None
    """Key that clients have to send. Others on this machine can read it in its list of processes."""
    api_key_file: OptionalFile = None
    """The same, in a file's first line."""
    slots: Count = None
    """Requests at work at the same time, over the whole machine; by default 64 for each device group as far as memory
    goes, and 8 where the CPU stands for GPUs."""
    context: Count = None
    """Tokens of prompt and answer that a request may have; by default the model's positions."""
    waiting: int = 1024
    """Requests that may wait for a slot; more are told to try again (429)."""
    default_max_tokens: Count = None
    """Tokens of a chat's answer where the request does not say; by default 4,096 with thinking and 512 without."""
    instant: Flag = False
    """Answer chats without thinking where the request does not say."""
    prefill_chunk: int = 512
    """Tokens of prompts that run beside a round at most: longer chunks start answers sooner and make others wait."""
    rounds_per_dispatch: int = 8
    """Rounds that the devices run before the server looks at what came, at most."""
    warm_up: Annotated[str | None, option("none|usual|all")] = None
    """Programs compiled before the server is ready: none, those without filters and log-probabilities, or all; by
    default all, and the usual ones where the CPU stands for GPUs."""
    drain: int = 600
    """Seconds that answers under way may take after SIGTERM; then they are cut off."""
    max_body: Annotated[int, option("MB")] = 32
    """Size of a request's body at most."""
    log_prompts: Flag = False
    """Write what clients send to the log, which otherwise has no text of theirs."""
    quiet: Flag = False
    """Write no line for each request."""


def check(options: Options) -> None:
    """Refuses what cannot be, before the checkpoint is read."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} are not installed: pip install 'kimi-jax[serve]'")
    if options.warm_up not in (None, "none", "usual", "all"):
        raise ValueError(f"--warm-up is {options.warm_up}; choose from none, usual, all")
    least = {"waiting": 0, "drain": 0, "max_body": 1, "port": 0, "slots": 1, "default_max_tokens": 1}
    for field, lowest in least.items():
        value = getattr(options, field)
        if value is not None and value < lowest:
            raise ValueError(f"--{field.replace('_', '-')} is {value}; it is at least {lowest}")
    if options.api_key is not None and options.api_key_file is not None:
        raise ValueError("--api-key and --api-key-file say the same thing; keep one")


def key_of(options: Options) -> str | None:
    """The key that clients send.

    Raises:
      ValueError: an empty one, or one that no header can hold.
    """
    key = options.api_key
    if options.api_key_file is not None:
        key = next(iter(read_text(options.api_key_file).splitlines()), "").strip()
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ValueError("the API key is empty or has characters that no header can hold; use letters and digits")
    return key


def slots_of(options: Options, opened: Opened, capacity: int) -> int:
    """Requests at work at the same time."""
    if options.slots is not None:
        return options.slots
    if opened.simulated:
        return SIMULATED_SLOTS * opened.engine.layout.groups
    from kimi_jax.commands.decode import largest_batch

    return max(1, largest_batch(opened, capacity))


def main(options: Options) -> None:
    """Serves until a signal ends it."""
    status = Console(stderr=True, soft_wrap=True)
    check(options)
    drafter = options.used_drafter(status)
    opened = open_engine(options, status, drafter)

    from kimi_jax.decoding.generate import Limits
    from kimi_jax.server.app import HttpLimits
    from kimi_jax.server.run import listen, serve
    from kimi_jax.server.start import Serving, app_on, open_queue

    capacity = options.context or opened.engine.config.max_position_embeddings
    serving = Serving(
        options.name or opened.folder.name,
        slots_of(options, opened, capacity),
        capacity,
        options.waiting,
        Limits(prefill_chunk=options.prefill_chunk, rounds_per_dispatch=options.rounds_per_dispatch),
        options.draft(drafter),
        options.warm_up or ("usual" if opened.simulated else "all"),  # pyright: ignore[reportArgumentType]
        not options.instant,
        options.default_max_tokens,
        HttpLimits(body_bytes=options.max_body * 1_000_000),
        key_of(options) if processes.this().prints else None,
        options.log_prompts,
    )

    if not processes.this().prints:
        open_queue(opened.engine, serving).follow()
        return

    def log(line: str) -> None:
        status.print(line, style="dim", highlight=False, markup=False)

    listener = listen(options.host, options.port)
    app = app_on(opened.engine, opened.folder, serving, (lambda line: None) if options.quiet else log)
    host, port = listener.getsockname()[:2]
    log(f"{serving.model} at http://{host}:{port}: {serving.slots} slots of {capacity:,} tokens; compiling")

    async def run() -> int:
        asyncio.get_running_loop().create_task(tell_ready())
        return await serve(app, listener, drain_seconds=options.drain)

    async def tell_ready() -> None:
        await app.loop.opened()
        if app.loop.ready:
            log(f"ready at http://{host}:{port}")

    ended = asyncio.run(run())
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that still compiles would keep the process for as long as that takes.
    os._exit(ended) if app.loop.running else sys.exit(ended)


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    main(parse(Options, args, prog, __doc__))
