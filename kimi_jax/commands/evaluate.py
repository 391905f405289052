"""Evaluate a Kimi K2.6 checkpoint.

Examples:
  uv run scripts/evaluate.py tasks --prompts 20
  uv run scripts/evaluate.py perplexity --checkpoint DIR --mesh nvl72 --window 4096 --stride 2048 text.txt
  uv run scripts/evaluate.py compare --other mesh=nvl72
  uv run scripts/evaluate.py logits --checkpoint DIR --input-ids ids.json --output logits.npz
  uv run scripts/evaluate.py reference --checkpoint DIR --mesh hgx-ib-8 reference.jsonl
lm-eval's tasks are run by `python -m kimi_jax.evaluation.lm_eval` (docs/evaluation.md).
"""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from kimi_jax.commands.options import (
    Count,
    DrafterOptions,
    EngineOptions,
    Files,
    Flag,
    Images,
    Json,
    OptionalFile,
    OptionalFolder,
    changed,
    dispatch,
    option,
)
from kimi_jax.commands.progress import bar_on, open_engine
from kimi_jax.opening import Opened
from kimi_jax.parallel import processes
from kimi_jax.provenance import fingerprint, provenance
from kimi_jax.standard_output import OutputConsole
from kimi_jax.tables import left, right, show, table
from kimi_jax.text_files import require_writable, whole_file, write_text
from meshes.devices import simulate, use_cpu_if_no_gpu

if TYPE_CHECKING:
    from kimi_jax.decoding.engine import Engine
    from kimi_jax.evaluation.tasks import FamilyScore
    from kimi_jax.vision.media import Medium


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitsOptions(EngineOptions):
    """Options of `logits`."""

    input_ids: Path
    """JSON file: a list of id lists of equal length."""
    output: Path
    """NPZ file to write: one array `logits` [sequences, tokens, vocabulary]."""
    image: Images = ()
    """Image that the placeholders of every list are about; given again for several, in their order."""


def run_logits(options: LogitsOptions) -> None:
    """Write the float32 logits of given token ids, to compare with a reference."""
    status = Console(stderr=True, soft_wrap=True)
    if options.output.suffix != ".npz":
        raise ValueError(f"{options.output}: the output is an NPZ file, so its name must end in .npz")
    require_writable(options.output)
    opened = open_engine(options, status)

    from kimi_jax.evaluation.logits import logits, read_ids

    sequences = read_ids(options.input_ids, opened.engine.config.vocab_size)
    with bar_on(status) as bar:
        task = bar.add_task("tokens", total=len(sequences[0]))
        media = pictures(opened.engine, options.image)[0]
        values = logits(opened.engine, sequences, lambda done, total: bar.update(task, completed=done), media)
    if processes.this().prints:
        with whole_file(options.output) as stream:
            np.savez(stream, logits=values)
    shape = " × ".join(map(str, values.shape))
    status.print(f"{options.output}: logits {shape} float32 ({opened.where})", style="dim", highlight=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceOptions(EngineOptions):
    """Options of `reference`."""

    file: Annotated[Path, tyro.conf.Positional]
    """JSON Lines file: objects with prompt_token_ids and prompt_logprobs, as vLLM gives them (docs/checkpoints.md)."""
    json: Json = False


def run_reference(options: ReferenceOptions) -> None:
    """Hold the checkpoint's log-probabilities against those that another engine gave for the same ids."""
    status, out = Console(stderr=True, soft_wrap=True), OutputConsole(soft_wrap=True, highlight=False)
    if not options.file.is_file():
        raise FileNotFoundError(f"{options.file}: no such file")
    opened = open_engine(options, status)

    from kimi_jax.evaluation.reference import agreement, read_references

    references = read_references(options.file, opened.engine.config.vocab_size)
    with bar_on(status) as bar:
        task = bar.add_task("tokens", total=sum(len(reference.ids) for reference in references))
        result = agreement(opened.engine, references, lambda done: bar.advance(task, done))
    if not processes.this().prints:
        return
    if options.json:
        print(json.dumps({"run": provenance(opened), **dataclasses.asdict(result)}))
        return
    row, place, token = result.largest_at
    out.print(f"{result.values:,} log-probabilities at {result.places:,} places of {len(references)} rows")
    out.print(f"mean difference {result.mean_difference:.3g}, largest {result.largest_difference:.3g}", end="")
    out.print(f" (row {row}, place {place}, token {token})")
    if result.same_top_token is not None:
        out.print(f"same top token {result.same_top_token:.2%}")
    out.print(f"perplexity {result.perplexity:.6g}, the reference's {result.reference_perplexity:.6g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityOptions(EngineOptions):
    """Options of `perplexity`."""

    files: Files
    """UTF-8 text files, each a text of its own."""
    window: int = 1024
    """Tokens that predict together: context and prediction of one run of the model."""
    stride: Count = None
    """Tokens that each window after the first predicts; by default half a window, so that all but the first see half a
    window of context or more."""
    batch: int = 8
    """Windows run together, spread over dp and ep."""
    bos: Flag = False
    """Begin every text with [BOS], so that its first token is predicted too."""
    journal: OptionalFile = None
    """File that keeps finished windows; the same command goes on where it was stopped."""
    json: Json = False


def run_perplexity(options: PerplexityOptions) -> None:
    """How well the checkpoint predicts texts: perplexity and bits a byte, every token weighted equally."""
    status = Console(stderr=True, soft_wrap=True)
    if options.journal is not None:
        require_writable(options.journal)
    opened = open_engine(options, status)

    from kimi_jax.evaluation.perplexity import perplexity, read_documents, together

    documents = read_documents(opened.engine, options.files, bos=options.bos)
    stride = options.stride or max(1, options.window // 2)
    with bar_on(status) as bar:
        task = bar.add_task("windows", total=None)
        results = perplexity(
            opened.engine, documents, window=options.window, stride=stride, batch=options.batch,
            journal=options.journal, checkpoint=fingerprint(opened.folder),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    total = together(results)
    if options.json:
        run = {"run": provenance(opened), "window": options.window, "stride": stride}
        print(json.dumps({**run, "texts": [result.as_dict() for result in results], "all": total.as_dict()}))
        return
    rows = [
        (each.name, f"{each.tokens:,}", f"{each.perplexity:,.4g}", f"{each.nats / each.tokens:.4f}",
         f"{each.bits_per_byte:.4f}")
        for each in [*results, *([total] if len(results) > 1 else [])]
    ]  # fmt: skip
    columns = (*left("text"), *right("tokens", "perplexity", "nats a token", "bits a byte"))
    show(
        f"Perplexity {total.perplexity:,.4g} over {total.tokens:,} tokens; {opened.where}.",
        table(f"windows of {options.window} tokens, stride {stride}", columns, rows),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TasksOptions(DrafterOptions):
    """Options of `tasks`."""

    budgets: tuple[int, ...] = (15,)
    """Draft tree nodes verified a round; each is one more way to decode, beside plain decoding."""
    chain: Flag = False
    """Also decode with the drafter's best chain."""
    families: tuple[str, ...] = ()
    """Task families; by default all ten."""
    prompts: int = 100
    """Held-out prompts of each family."""
    batch: int = 8
    """Prompts decoded together."""
    log_samples: OptionalFile = None
    """JSONL file to write: every prompt with its reference and the text and token ids of each way to decode."""
    json: Json = False


def run_tasks(options: TasksOptions) -> None:
    """Exact match on the bundled model's task families, greedy, with and without speculation in one run."""
    status = Console(stderr=True, soft_wrap=True)
    if options.log_samples is not None:
        require_writable(options.log_samples)
    drafter = options.known_drafter(status)
    opened = open_engine(options, status, drafter)

    from kimi_jax.decoding.engine import PLAIN, Draft
    from kimi_jax.evaluation.tasks import samples, score
    from kimi_jax.training.tasks import FAMILIES

    families = options.families or tuple(FAMILIES)
    drafts = {"none": PLAIN}
    if drafter and options.chain:
        drafts["chain"] = Draft("chain")
    if drafter:
        drafts |= {f"ddtree {budget}": Draft("ddtree", budget) for budget in options.budgets}
    with bar_on(status) as bar:
        task = bar.add_task("prompts", total=len(families) * options.prompts * len(drafts))
        scores = score(
            opened.engine, options.prompts, list(drafts.values()), families, batch=options.batch,
            progress=lambda count: bar.advance(task, count),
        )  # fmt: skip
    ways = dict(zip(drafts, scores, strict=True))
    if options.log_samples is not None and processes.this().prints:
        lines = [{"run": provenance(opened)}, *samples(opened.engine, ways)]
        write_text(options.log_samples, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if options.json:
        print(json.dumps({"run": provenance(opened), **tasks_as_dict(ways)}))
    else:
        print_tasks(ways, opened, options.batch)


def tasks_as_dict(ways: "dict[str, dict[str, FamilyScore]]") -> dict[str, Any]:
    """Scores by way of decoding and family, `all` among the families."""
    from kimi_jax.evaluation.tasks import together

    whole = {name: scores | {"all": together(scores)} for name, scores in ways.items()}
    plain = whole["none"]["all"].answers
    return {
        "scores": {name: {family: s.as_dict() for family, s in scores.items()} for name, scores in whole.items()},
        "same_answers": {name: scores["all"].answers == plain for name, scores in whole.items() if name != "none"},
    }


def print_tasks(ways: "dict[str, dict[str, FamilyScore]]", opened: Opened, batch: int) -> None:
    """The answer in a line, and for each family a row of plain decoding and one of each tree."""
    from kimi_jax.evaluation.tasks import together, wilson

    def interval(score: "FamilyScore") -> str:
        low, high = wilson(score.exact, score.prompts)
        return f"{low:.1%} to {high:.1%}"

    ways = {name: scores | {"all": together(scores)} for name, scores in ways.items()}
    first = next(iter(ways.values()))
    rows: list[tuple[str, ...] | None] = []
    for family in first:
        if family == "all":
            rows.append(None)
        for name, scores in ways.items():
            base, score = first[family], scores[family]
            same = sum(a == b for a, b in zip(base.answers, score.answers, strict=True))
            before, after = base.tokens_per_second, score.tokens_per_second
            drafted = score is not base
            rows.append(
                (family if not drafted else "", name, f"{score.exact_match:.1%}", interval(score),
                 f"{same}/{score.prompts}" if drafted else "", f"{score.acceptance:.2f}" if drafted else "",
                 rate(after), f"{after / before:.2f}×" if drafted and before and after else "")
            )  # fmt: skip
    columns = (
        *left("family", "draft"),
        *right("exact match", "95 % interval", "same answers", "tokens a round", "tokens/s", "speed-up"),
    )
    everything = first["all"]
    show(
        f"Exact match {everything.exact_match:.1%} ({interval(everything)}) over {everything.prompts} prompts; "
        f"{opened.where}.",
        table(f"greedy, batches of {batch}, tokens/s without prefill", columns, rows),
    )


def rate(tokens_per_second: float | None) -> str:
    """Where it could be measured."""
    return "" if tokens_per_second is None else f"{tokens_per_second:.1f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions(EngineOptions):
    """Options of `compare`."""

    files: Files = ()
    """UTF-8 text files to run; by default one chat of each of the bundled model's task families."""
    other: Annotated[tuple[str, ...], option("NAME=VALUE ...")] = ()
    """What is different for the other, as options without their dashes: mesh=nvl72 tp=4, dtype=bfloat16,
    checkpoint=DIR. Where the mesh differs, axes that are not said are its preset's."""
    tokens: int = 512
    """Tokens of each text at most."""
    batch: int = 8
    """Texts run together, spread over dp and ep."""
    image: Images = ()
    """Image that stands before every text; given again for several."""
    tolerance: float = 1e-4
    """Relative difference of a layer's output beyond which it counts as different."""
    scratch: OptionalFolder = None
    """Folder for the first one's logits and layers, removed at the end; by default the system's temporary one."""
    json: Json = False


def run_compare(options: CompareOptions) -> None:
    """Two checkpoints, or one under two settings: KL, top-1 agreement, logits, and the first layer that differs."""
    status = Console(stderr=True, soft_wrap=True)
    other = changed(options, options.other)
    if other == changed(options, ()):
        raise ValueError("the two are the same: say with --other NAME=VALUE what differs")
    sizes = {each.layout.preset().layout.num_devices for each in (options, other)}
    if len(sizes) > 1 and not use_cpu_if_no_gpu():  # before either starts the devices
        simulate(max(sizes))
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="kimi_jax_compare_") as scratch:
        opened = open_engine(options, status)

        from kimi_jax.evaluation.compare import compare, record

        media, before = pictures(opened.engine, options.image)
        sequences = [before + ids for ids in texts_of(options, opened.engine)]
        count = sum(map(len, sequences))
        with bar_on(status) as bar:
            task = bar.add_task("first", total=count)
            recording = record(
                opened.engine, sequences, Path(scratch), batch=options.batch, media=media,
                progress=lambda done: bar.advance(task, done),
            )  # fmt: skip
        first_run = provenance(opened)
        del opened  # its weights go before the other's come
        second = open_engine(other, status)
        with bar_on(status) as bar:
            task = bar.add_task("second", total=count)
            result = compare(
                second.engine, recording, tolerance=options.tolerance, batch=options.batch,
                progress=lambda done: bar.advance(task, done),
            )  # fmt: skip
    if options.json:
        print(json.dumps({"first": first_run, "second": provenance(second), **result.as_dict()}))
        return
    if result.first_layer is None:
        verdict = f"No layer differs by more than {options.tolerance:g}."
    else:
        verdict = f"Layer {result.first_layer} is the first that differs by more than {options.tolerance:g}."
    figures = (
        f"{result.kl_mean:.3g}", f"{result.kl_largest:.3g}", f"{result.top1_agreement:.2%}",
        f"{result.largest_logit_difference:.3g}",
    )  # fmt: skip
    layers = [
        (str(number), f"{layer.mean:.3g}", f"{layer.largest:.3g}",
         *((str(layer.sequence + 1), str(layer.position)) if layer.largest else ("", "")))
        for number, layer in enumerate(result.layers)
    ]  # fmt: skip
    show(
        verdict,
        f"First: {options.checkpoint}, {first_run['ran']}.",
        f"Second: {other.checkpoint}, {second.where}.",
        table(
            f"{result.tokens} tokens of {len(sequences)} texts",
            right("KL mean", "KL largest", "same top token", "largest logit difference"), [figures],
        ),
        table(
            "output of each layer: ‖second - first‖ / ‖first‖ of a token",
            right("layer", "mean", "largest", "text", "token"), layers,
        ),
    )  # fmt: skip


def pictures(engine: "Engine", files: Sequence[Path]) -> "tuple[list[Medium], list[int]]":
    """Images as the tower takes them, and the ids that stand for them in a prompt."""
    if not files:
        return [], []
    from kimi_jax.chat import placeholders
    from kimi_jax.decoding.conversation import album_of
    from kimi_jax.vision.media import NO_TOWER, MediumError

    album = album_of(engine)
    if album is None:
        raise MediumError(NO_TOWER)
    shown = [each for file in files for each in album.look({"type": "image", "image": file}, str(file))]
    return album.media, placeholders(shown, engine.tokenizer)


def texts_of(options: CompareOptions, engine: "Engine") -> list[list[int]]:
    """Ids of the texts to run, cut to the limit."""
    if options.files:
        from kimi_jax.evaluation.perplexity import read_documents

        ids = [document.ids for document in read_documents(engine, options.files, bos=False)]
    else:
        from kimi_jax.training.data import encode_chat
        from kimi_jax.training.tasks import FAMILIES, held_out

        tokenizer, examples = engine.tokenizer, [held_out(family, 1)[0] for family in FAMILIES]
        ids = [encode_chat(tokenizer, e.prompt, tokenizer.encode(e.answer)).ids for e in examples]
    return [text[: options.tokens] for text in ids]


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    commands = {
        "logits": run_logits,
        "reference": run_reference,
        "perplexity": run_perplexity,
        "tasks": run_tasks,
        "compare": run_compare,
    }
    dispatch(commands, args, prog, __doc__)
