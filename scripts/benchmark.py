"""Benchmarks. Timings are ratios within one run on one machine; nothing here is a test.

Examples:
  uv run scripts/benchmark.py speculation
  uv run scripts/benchmark.py speculation --checkpoint DIR --drafter DIR --file prompts.txt --budgets 8 16 32 --json
"""

import dataclasses
import json
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kimi_jax.cli import BUNDLED_DRAFTER, EngineOptions, errors_in_one_line, open_engine, table_console
from kimi_jax.prompts import Prompt, encode, read_prompts

PROMPTS = (
    "Add 478 and 356.",
    'Reverse "garden".',
    "Write the date 2024-03-17 in words.",
    "Write as JSON: name=kxq, age=31, city=abcd.",
    "Convert 37 km to m.",
    "Tell a story about a fox named Mila, a forest and a coin.",
)


@dataclasses.dataclass(frozen=True)
class SpeculationOptions(EngineOptions):
    """Options of `speculation`."""

    drafter: Path = BUNDLED_DRAFTER
    """Directory of a DFlash drafter made for the checkpoint."""
    file: Path | None = None
    """Prompts, as for decode.py; by default a few that suit the bundled checkpoint."""
    budgets: tuple[int, ...] = (8, 16, 32)
    """Tree nodes to try, beside plain decoding and the chain."""
    max_new_tokens: int = 64
    """Tokens generated for each prompt at most."""
    repeats: int = 5
    """Timed repetitions; one more compiles."""
    instant: bool = True
    """Prompts in instant mode, without a thinking part."""
    json: bool = False
    """Print one JSON object instead of a table."""


def speculation(options: SpeculationOptions) -> None:
    """Plain decoding, chain and trees on the same prompts, one at a time: tokens/s, acceptance, speed-up."""
    status = Console(stderr=True, soft_wrap=True, quiet=options.json)
    with errors_in_one_line(Console(stderr=True)):
        opened = open_engine(options, status, options.drafter)

        from kimi_jax.decoding.engine import PLAIN, Draft
        from kimi_jax.evaluation.speed import measure_speculation

        prompts = read_prompts(options.file) if options.file else [Prompt.of(text) for text in PROMPTS]
        ids = encode(prompts, opened.engine.tokenizer, raw=False, thinking=not options.instant, system=None)
        drafts = [PLAIN, Draft("chain"), *(Draft("ddtree", budget) for budget in options.budgets)]
        with Progress(console=status, transient=True, disable=not status.is_terminal) as bar:
            task = bar.add_task("decoding", total=len(drafts) * (options.repeats + 1))
            speeds = measure_speculation(
                opened.engine, ids, drafts, max_new_tokens=options.max_new_tokens, repeats=options.repeats,
                progress=lambda: bar.advance(task),
            )  # fmt: skip
        base = speeds[0].median
        rows = [
            {
                "speculation": speed.draft.kind,
                "budget": speed.draft.budget if speed.draft.kind == "ddtree" else None,
                "tokens_per_second_median": round(speed.median, 1),
                "spread": round(speed.spread, 3),
                "acceptance_length": round(speed.acceptance_length, 3),
                "speed_up": round(speed.median / base, 2),
                "same_text": speed.same_text,
            }
            for speed in speeds
        ]
        if options.json:
            print(json.dumps({"ran": opened.where, "prompts": len(prompts), "results": rows}))
            return
        table = Table(title=f"{len(prompts)} prompts, batch 1, {options.repeats} repeats; {opened.where}")
        for name in ("speculation", "budget", "tokens/s", "±", "tokens a round", "speed-up", "same text"):
            table.add_column(name, justify="left" if name == "speculation" else "right")
        for row in rows:
            table.add_row(
                row["speculation"], str(row["budget"] or ""), f"{row['tokens_per_second_median']:.1f}",
                f"{row['spread']:.0%}", f"{row['acceptance_length']:.2f}", f"{row['speed_up']:.2f}×",
                "yes" if row["same_text"] else "NO",
            )  # fmt: skip
        table_console().print(table)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(
        {"speculation": speculation}, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)
    )
