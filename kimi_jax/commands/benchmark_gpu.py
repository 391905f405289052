"""`benchmark gpu`: a card taken through the kernels, a round and a text, with a verdict a line."""

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Literal

from rich.console import Console

from kimi_jax.commands.options import Flag, Json, OptionalFile
from kimi_jax.gpu_check.steps import Line, Step, card_steps, rehearsal_steps, run
from kimi_jax.tables import left, show, table
from kimi_jax.text_files import require_writable, write_text
from meshes.devices import visible_gpu_count


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `gpu`."""

    random: bool = True
    """Also time rounds of K2.6's first layers with random INT4 weights: 3 layers and a drafter take about 32 GB."""
    layers: int = 3
    """Layers of that round; the first has no experts."""
    plain: Flag = False
    """Also time what jax itself offers: dequantise and `jax.lax.ragged_dot`, `jax.nn.dot_product_attention`."""
    only: str = "."
    """Regular expression over the names of steps, such as "card", "tree_attention dp-" or "round"."""
    rehearse: Literal["h100", "h200", "b200", "gb200", "b300", "gb300"] | None = None
    """Without a GPU: everything that needs none, for this card. The kernels' values on small shapes in the interpreter,
    and the round compiled."""
    output: OptionalFile = None
    """Also write all figures to a JSON file."""
    json: Json = False


def gpu(options: Options) -> None:
    """Takes the GPU of this machine through the first hour's questions in ten minutes; status 1 where one fails."""
    if options.output is not None:
        require_writable(options.output)
    if options.rehearse is None and not visible_gpu_count():
        raise ValueError("no GPU is visible to this process: run it on one, or take --rehearse h200 or gb300")
    steps = (
        card_steps(options.layers, options.random, options.plain)
        if options.rehearse is None
        else rehearsal_steps(options.rehearse, options.layers, options.random)
    )
    chosen = [step for step in steps if re.search(options.only, f"{step.section} {step.name}")]
    if not chosen:
        names = ", ".join(f"{step.section} {step.name}" for step in steps)
        raise ValueError(f"no step matches {options.only!r}; there are {names}")
    lines = list(_run(chosen, Console(stderr=True, quiet=options.json)))
    failed = [line for line in lines if line.verdict == "fail"]
    record = {"failed": len(failed), "lines": [dataclasses.asdict(line) for line in lines]}
    if options.output is not None:
        write_text(options.output, json.dumps(record, indent=1) + "\n")
    if options.json:
        print(json.dumps(record))
    else:
        title = f"FAIL: {len(failed)} of {len(lines)} verdicts" if failed else f"PASS: {len(lines)} verdicts"
        rows = [(line.verdict, f"{line.section} {line.name}", line.figure) for line in lines]
        show(table(title, left("verdict", "step", "found"), rows))
    if failed:
        raise SystemExit(1)


def _run(steps: list[Step], console: Console) -> Iterable[Line]:
    with console.status("starting") as status:
        for number, step in enumerate(steps, 1):
            status.update(f"{number} of {len(steps)}: {step.section} {step.name}")
            yield from run(step)
