"""The commands of `kimi-jax`, one module each; `scripts/` has a file for each that runs it from a checkout."""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "decode": "Decode prompts and stream their text.",
    "serve": "Serve a checkpoint to clients of the OpenAI API.",
    "estimate": "Say which layout, how many GPUs and what tree a load wants.",
    "profile": "Say what a step holds, reads, computes and sends, compiled for absent GPUs or measured here.",
    "evaluate": "Score a checkpoint, or hold two checkpoints or layouts against each other.",
    "convert": "Plan, shard and write checkpoints.",
    "train": "Train the bundled model and its drafter.",
    "benchmark": "Measure speculation, scaling, peers and kernels.",
    "doctor": "Say what this machine has, what it would use, and what stands in the way.",
}


def run(name: str, args: Sequence[str], prog: str | None = None) -> None:
    """Runs one command of COMMANDS with its arguments; `prog` is what its help calls it."""
    from kimi_jax.commands.errors import command

    with command():
        importlib.import_module(f"kimi_jax.commands.{name}").run(args, prog)


def main() -> None:
    """Runs `kimi-jax COMMAND …`."""
    name, *args = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        run(name, args, f"kimi-jax {name}")
        return
    asked = name in ("-h", "--help")
    lines = ["usage: kimi-jax COMMAND …", "", *(f"  {command:<10} {text}" for command, text in COMMANDS.items()), ""]
    lines.append("kimi-jax COMMAND --help lists a command's options.")
    if not asked:
        lines.append(f"error: there is no command {name!r}")
    from kimi_jax.commands.errors import command

    with command():
        print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
        raise SystemExit(0 if asked else 2)
