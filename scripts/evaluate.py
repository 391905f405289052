"""Evaluate a Kimi K2.6 checkpoint.

Examples:
  uv run scripts/evaluate.py logits --input-ids ids.json --output logits.npz
  uv run scripts/evaluate.py logits --checkpoint DIR --mesh nvl72 --input-ids ids.json --output logits.npz
"""

import dataclasses
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from kimi_jax.cli import MeshOptions, errors_in_one_line, open_engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsOptions(MeshOptions):
    """Options of `logits`."""

    input_ids: Path
    """JSON file: a list of id lists of equal length."""
    output: Path
    """NPZ file to write: one array `logits` [sequences, tokens, vocabulary]."""


def run_logits(options: LogitsOptions) -> None:
    """Write the float32 logits of given token ids, to compare with a reference."""
    status = Console(stderr=True, soft_wrap=True)
    with errors_in_one_line(status):
        if options.output.suffix != ".npz":
            raise ValueError(f"{options.output}: the output is an NPZ file, so its name must end in .npz")
        opened = open_engine(options, status)

        from kimi_jax.evaluation.logits import logits, read_ids

        sequences = read_ids(options.input_ids, opened.engine.config.vocab_size)
        with Progress(console=status, transient=True, disable=not status.is_terminal) as bar:
            task = bar.add_task("tokens", total=len(sequences[0]))
            values = logits(opened.engine, sequences, lambda done, total: bar.update(task, completed=done))
        np.savez(options.output, logits=values)
        shape = " × ".join(map(str, values.shape))
        status.print(f"{options.output}: logits {shape} float32 ({opened.where})", style="dim", highlight=False)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"logits": run_logits}, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)
    )
