"""Decode prompts with a Kimi K2.6 checkpoint: text streams as it is generated, one line sums up the run.

Examples:
  uv run scripts/decode.py --instant "Add 612 and 259."
  uv run scripts/decode.py --mesh nvl72 "Tell a story about a fox named Mila, a forest and a coin."
  uv run scripts/decode.py --file prompts.jsonl --temperature 0.6 --top-p 0.95 --json
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from kimi_jax import tables
from kimi_jax.commands.options import (
    Count,
    Flag,
    Images,
    Json,
    OptionalFile,
    OptionalFolder,
    SpeculationOptions,
    option,
    parse,
)
from kimi_jax.commands.progress import bar_on, open_engine
from kimi_jax.generation_defaults import SAMPLING_FIELDS, new_tokens, sampling_fields
from kimi_jax.opening import BUNDLED_CHECKPOINT, Opened
from kimi_jax.prompts import Prompt, PromptError, encode, raw_texts, read_prompts
from kimi_jax.provenance import provenance
from kimi_jax.text_files import read_standard_input, require_folder, require_writable
from kimi_jax.text_output import Screen, as_json
from meshes.devices import use_cpu_if_no_gpu

if TYPE_CHECKING:
    from kimi_jax.decoding.batch import Batch
    from kimi_jax.decoding.report import Report
    from kimi_jax.decoding.sampling import Sampling
    from kimi_jax.estimator.scenario import Scenario

PROMPTS_OF_A_GROUP = 64
"""Prompts that a device group decodes together at most where `--batch` does not say."""
Number = Annotated[float | None, option("X")]
FORM = tyro.conf.create_mutex_group(required=False, title="prompt form")
MODE = tyro.conf.create_mutex_group(required=False, title="thinking")


@dataclasses.dataclass(frozen=True)
class Options(SpeculationOptions):
    """Options of decode.py."""

    prompts: Annotated[tuple[str, ...], tyro.conf.Positional, option("PROMPT ...")] = ()
    """Prompts, decoded as one batch. With none and no --file, standard input is one prompt."""
    file: OptionalFile = None
    """Prompts from a file: one a line, or with the ending .jsonl one {"messages": […], "tools": […]} or
    {"prompt": "…"} a line, which may set id, max_tokens, temperature, top_p, top_k, min_p, seed and stop of its own."""
    image: Images = ()
    """Image that the prompts among the arguments are about; given again for several. A .jsonl file has images as parts
    of messages: {"type": "image_url", "image_url": {"url": "data:…"}} or {"type": "image", "image": "FILE"}."""
    fetch_images: Flag = False
    """Fetch images whose url in a .jsonl file is an http:// or https:// address."""
    chat: Annotated[Flag, FORM] = False
    """Wrap prompts in K2.6's chat template (the default)."""
    raw: Annotated[Flag, FORM] = False
    """Continue the prompt's text as it is."""
    thinking: Annotated[Flag, MODE] = False
    """Let the model think before it answers (the default)."""
    preserve_thinking: Annotated[Flag, MODE] = False
    """Let it think, and keep the thinking of all earlier turns of a conversation in the prompt: what Kimi K2.7-Code
    expects, always."""
    instant: Annotated[Flag, MODE] = False
    """Answer at once."""
    system: Annotated[str | None, option("TEXT")] = None
    """System message put before every prompt."""
    max_new_tokens: Count = None
    """Tokens generated for each prompt at most; by default 4,096 with thinking and 512 without, or what the model's
    positions leave."""
    temperature: Number = None
    """0, the default, takes the most likely token; K2.6's authors use 1.0 for thinking and 0.6 for instant answers.
    Where these four are not given, the checkpoint's generation_config.json counts."""
    top_p: Number = None
    """Sample from the most likely tokens that together reach this probability; by default 1."""
    top_k: Count = None
    """Sample from this many most likely tokens; 0, the default, means all."""
    min_p: Number = None
    """Leave out tokens below this fraction of the most likely token's probability; by default 0."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N", aliases=["--slots"])] = None
    """Prompts decoded together; the next one takes its slot as soon as one ends. By default as many as fit in the GPUs'
    memory, 64 for each device group at most."""
    pages: Count = None
    """Pages of 64 tokens (times the ranks that split a cache) for the latents of each device group. By default enough
    for the longest prompt and answer in every slot, or as many as the memory holds."""
    seed: int = 0
    """Same seed, same text, whatever the mesh and the batch (in float32)."""
    synthetic_acceptance: Annotated[float | None, option("TOKENS")] = None
    """Pretend this mean acceptance length, to measure throughput. The text is then meaningless."""
    rebalance_every: Count = None
    """Count the rows that choose each expert, and move experts every N rounds to where all ranks have equally many."""
    save_placement: OptionalFile = None
    """With --rebalance-every: where experts lie at the end, as a file for --placement."""
    time_parts: Flag = False
    """Also measure the share of a round that drafting, verifying and committing take (compiles each of them)."""
    xla_dump: OptionalFolder = None
    """Directory for XLA's dump of the programs that ran: HLO before and after optimisation, buffer assignment, and an
    index of the files and of the parts of the model (compiles them again)."""
    trace: OptionalFolder = None
    """Directory for a profiler trace of one dispatch of rounds, for xprof."""
    explain: Flag = False
    """Print how the checkpoint lies on the mesh (who holds what, bytes of a device, messages and their links) and load
    nothing. Prompts count as requests; their length is not known, so the cache is that of --explain-context tokens."""
    explain_context: int = 8192
    """Cached tokens of each request that --explain counts."""
    lines: Annotated[Literal["order", "done"] | None, option("order|done")] = None
    """Print one line of JSON for each prompt, in their order or as they end, and a last one with the summary."""
    journal: OptionalFile = None
    """File that remembers each answer as it ends: a run that was stopped goes on behind it with the same command."""
    verbose: Annotated[bool, option(aliases=["-v"])] = False
    """Also print how many drafts were accepted, what served each operation and why, and overflows of buffers."""
    json: Json = False

    @property
    def uses_cache(self) -> bool:
        """Not for a dump: the compiler writes nothing of a program that it does not compile."""
        return super().uses_cache and self.xla_dump is None


def gather_prompts(options: Options) -> list[Prompt]:
    """Prompts from the arguments and the file, or from standard input."""
    prompts = [Prompt.of(text, options.image) for text in options.prompts]
    if options.file is not None:
        prompts += read_prompts(options.file)
    if not prompts:
        text = "" if sys.stdin is None or sys.stdin.isatty() else read_standard_input(sys.stdin.buffer)
        if not text.strip():
            raise ValueError("no prompt: give one as an argument, with --file, or on standard input")
        prompts = [Prompt.of(text, options.image)]
    return prompts


def wanted_of(options: Options, prompt: Prompt, defaults: Mapping[str, Any]) -> "tuple[Sampling, int, int]":
    """Sampling, seed and most new tokens: what the prompt's row says, else the options, else the defaults.

    Raises:
      PromptError: naming the row.
    """
    from kimi_jax.decoding.sampling import Sampling, check_seed

    said = {name: value for name, value in vars(options).items() if value is not None}
    said |= {name: value for name, value in vars(prompt.wishes).items() if value is not None}

    def of(name: str) -> Any:
        return said.get(name, defaults.get(name))

    try:
        fields = {name: of(name) for name in SAMPLING_FIELDS if of(name) is not None}
        return Sampling(**fields), check_seed(of("seed")), of("max_new_tokens")
    except ValueError as error:
        raise PromptError(f"{prompt.where}: {error}" if prompt.where else str(error)) from None


def explain_layout(options: Options, drafter: Path | None) -> None:
    """Prints the layout from the configurations alone."""
    use_cpu_if_no_gpu()
    from kimi_jax.config import ModelConfig
    from kimi_jax.decoding.loading import model_for, placements_of
    from kimi_jax.drafter.config import DrafterConfig
    from kimi_jax.ledger import layout_rules
    from kimi_jax.ledger.explain import explain, explain_data
    from kimi_jax.ledger.step import Step

    machine = options.layout.preset()
    config = ModelConfig.from_json(options.checkpoint)
    placements = placements_of(options.checkpoint, config, machine.layout, options.placement)
    model = model_for(config, machine.layout, placements)
    budget = 15 if options.budget == "auto" else options.budget
    drafter_config = None if drafter is None or not budget else DrafterConfig.from_json(drafter)
    layout_rules.check(config, machine.layout, drafter_config)
    step = Step(
        config,
        machine.layout,
        requests=max(1, len(options.prompts)),
        rows=1 if drafter_config is None else 1 + budget,
        context=options.explain_context,
        drafter=drafter_config,
        program="decode",
        slots=model.placement.num_slots,
        dtype="float32" if options.dtype == "float32" else "bfloat16",
        greedy=not options.temperature,
    )
    if options.json:
        print(json.dumps(explain_data(machine, step, model.placement)))
    else:
        tables.show(*explain(machine, step, model.placement))


def check(options: Options, prompts: Sequence[Prompt]) -> None:
    """Refuses what cannot be, before the checkpoint is read."""
    if options.save_placement is not None and options.rebalance_every is None:
        raise ValueError("--save-placement keeps what --rebalance-every finds: give that too")
    for folder in filter(None, (options.xla_dump, options.trace)):
        require_folder(folder)
    for file in filter(None, (options.save_placement, options.journal)):
        require_writable(file)
    for file in options.image:
        if not file.is_file():
            raise ValueError(f"{file}: no such image")
    if options.raw:
        raw_texts(prompts, options.system)
    for prompt in prompts:
        wanted_of(options, prompt, {"max_new_tokens": 1})
    for name in ("batch", "pages"):
        if (given := getattr(options, name)) is not None and given < 1:
            raise ValueError(f"--{name} is {given}; it must be positive")


def main(options: Options) -> None:
    """Runs one batch."""
    status = Console(stderr=True, quiet=options.json or options.lines is not None, soft_wrap=True)
    drafter = options.used_drafter(status)
    if options.explain:
        explain_layout(options, drafter)
        return
    prompts = gather_prompts(options)
    check(options, prompts)
    opened = open_engine(options, status, drafter)
    if options.rebalance_every is not None:
        opened = dataclasses.replace(opened, engine=opened.engine.rebalancing(options.rebalance_every))
    if options.synthetic_acceptance is not None:
        warning = f"synthetic acceptance {options.synthetic_acceptance}: THE TEXT IS MEANINGLESS, only speed counts"
        Console(stderr=True).print(warning, style="bold red")

    from kimi_jax.decoding.generate import NonFiniteLogitsError
    from kimi_jax.profiling.live import Trace

    batch = batch_of(options, opened, prompts, drafter, status)
    answers = Answers(options, opened, batch)
    todo = batch.only(answers.left)
    screen, trace, failure = Screen(todo.prompts, todo.readers), Trace(options.trace), None
    shows_texts = not (options.json or options.lines)
    with bar_on(Console(stderr=True, quiet=shows_texts or len(prompts) == 1)) as bar:
        task = bar.add_task("answered", total=len(prompts), completed=len(prompts) - len(answers.left))
        try:
            with status.status("compiling") as spinner:
                for ended in todo:
                    spinner.stop()
                    trace.dispatched()
                    for index in ended:
                        answers.add(answers.left[index], todo.result(index))
                    bar.update(task, advance=len(ended))
                    if shows_texts:
                        screen.update()
        except NonFiniteLogitsError as error:
            failure = error  # the others have their texts
    if options.trace is not None:
        status.print(trace.close(), style="dim", highlight=False)
    summary = summarise(options, opened, todo, status) if answers.left else {"prompts": len(prompts)}
    summary |= {"from_journal": len(prompts) - len(answers.left)} if options.journal else {}
    if options.lines:
        print(as_json({"summary": summary}), flush=True)
    elif options.json:
        print(as_json({"results": answers.results, "summary": summary}))
    if failure is not None:
        raise failure


class Answers:
    """What has come of the prompts, from this run and from earlier ones that a journal tells of."""

    def __init__(self, options: Options, opened: Opened, batch: "Batch"):
        from kimi_jax.decoding.journal import Journal
        from kimi_jax.parallel import processes

        self._lines, self._printed = options.lines, 0
        self._found: dict[int, dict[str, Any]] = {}
        self._journal: Journal | None = None
        self._writes = processes.this().prints  # one of several processes
        if options.journal is not None:
            run = provenance(opened, batch.draft, options.seed)
            decides = {name: run[name] for name in ("checkpoint", "dtype") if name in run}
            how = {"raw": options.raw, "instant": options.instant, "synthetic": options.synthetic_acceptance}
            self._journal = Journal(options.journal, decides | how)
            pairs = zip(batch.prompts, batch.requests, strict=True)
            self._keys = [self._journal.key(each, stop=prompt.wishes.stop, id=prompt.id) for prompt, each in pairs]
            known = self._journal.results
            self._found = {index: known[key] for index, key in enumerate(self._keys) if key in known}
        self.left = [index for index in range(len(batch.prompts)) if index not in self._found]
        """Prompts that are still to be answered."""
        for index in [*self._found]:
            self._show(index)

    @property
    def results(self) -> list[dict[str, Any]]:
        """In the prompts' order."""
        return [self._found[index] for index in sorted(self._found)]

    def add(self, index: int, result: dict[str, Any]) -> None:
        """Takes an answer, writes it down and prints it where lines are wanted."""
        self._found[index] = result
        if self._journal is not None and self._writes and result["finish_reason"] != "error":
            self._journal.add(self._keys[index], result)
        self._show(index)

    def _show(self, index: int) -> None:
        if self._lines == "done":
            print(as_json({"index": index} | self._found[index]), flush=True)
        while self._lines == "order" and self._printed in self._found:
            print(as_json({"index": self._printed} | self._found[self._printed]), flush=True)
            self._printed += 1


def batch_of(
    options: Options, opened: Opened, prompts: Sequence[Prompt], drafter: Path | None, status: Console
) -> "Batch":
    """The prompts as requests, with what the checkpoint advises where neither they nor the options say."""
    from kimi_jax.decoding.batch import Batch
    from kimi_jax.decoding.conversation import album_of
    from kimi_jax.decoding.generate import Limits, Request

    engine, thinking = opened.engine, not options.instant
    defaults = sampling_fields(opened.folder)
    if defaults.keys() - {name for name in SAMPLING_FIELDS if getattr(options, name) is not None}:
        told = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        status.print(f"generation_config.json says {told}; options count before it", style="dim", highlight=False)
    albums = [album_of(engine, addresses=options.fetch_images) for _ in prompts]
    ids = encode(prompts, engine.tokenizer, raw=options.raw, thinking=thinking, system=options.system,
                 preserve_thinking=options.preserve_thinking,
                 looks=[None if album is None else album.look for album in albums])  # fmt: skip
    context = max(map(len, ids))
    defaults["max_new_tokens"] = new_tokens(
        thinking and not options.raw, engine.config.max_position_embeddings, context
    )
    wanted = [wanted_of(options, prompt, defaults) for prompt in prompts]
    media = [() if album is None else tuple(album.media) for album in albums]
    requests = [Request(row, *each, media=own) for row, each, own in zip(ids, wanted, media, strict=True)]
    size = options.batch or largest_batch(opened, context + max(request.max_new_tokens for request in requests))
    draft = options.draft(drafter, options.synthetic_acceptance)
    limits = Limits(pages=options.pages)
    return Batch.of(engine, draft, prompts, requests, size, limits, raw=options.raw, thinking=thinking)


def summarise(options: Options, opened: Opened, batch: "Batch", status: Console) -> dict[str, Any]:
    """Does what is asked for after the texts, prints it, and gives the summary for JSON."""
    from kimi_jax.parallel import processes
    from kimi_jax.parallel.eplb import save_placements
    from kimi_jax.profiling.live import dump_generation

    engine, draft, sampling, report = batch.engine, batch.draft, batch.sampling, batch.report
    context, most = batch.context, batch.most
    if options.xla_dump is not None:
        with status.status("compiling again for the dump"):
            dump_generation(
                engine, opened.machine, opened.gpu.name, engine.next_programs(draft, batch.size, context, most),
                options.xla_dump, requests=batch.size, context=context, new_tokens=most,
            )  # fmt: skip
    picks = engine.picks(draft, batch.size, context + most)
    if options.verbose:
        status.print(f"{report.details()}; {', '.join(map(str, picks))}", style="dim", highlight=False)
        if draft.kind != "none":
            status.print(report.table())
    run = provenance(opened, draft, options.seed) | {"sampling": dataclasses.asdict(sampling)}
    summary = report.as_dict() | {"ran": opened.where, "speculation": draft.kind, "run": run}
    if engine.rebalancer is not None:
        status.print(engine.rebalancer.summary(), style="dim", highlight=False)
        summary["rebalancing"] = [dataclasses.asdict(move) for move in engine.rebalancer.moves]
        if options.save_placement is not None and processes.this().prints:
            save_placements(options.save_placement, list(engine.rebalancer.placements.values()))
    automatic = engine.automatic(draft, batch.size, context, most)
    if automatic is not None:
        summary["automatic_budget"] = automatic.as_dict()
    if options.time_parts:
        with status.status("timing the parts of a round"):
            seconds = engine.part_seconds(batch.ids[: batch.size], most, draft)
        summary["round_seconds_by_part"] = seconds
        whole = sum(seconds.values())
        parts = ", ".join(f"{part} {time / whole:.0%}" for part, time in seconds.items())
        status.print(f"a round takes {1e3 * whole:.1f} ms: {parts}", style="dim", highlight=False)
    status.print(report.summary(), style="dim", highlight=False)
    if (advice := advice_of(opened, options, batch.size, context + most, report)) is not None:
        status.print(advice, style="dim", highlight=False)
        summary["advice"] = advice
    return summary | {"implementations": [dataclasses.asdict(pick) for pick in picks]}


def largest_batch(opened: Opened, context: int) -> int:
    """Prompts decoded together at most, for texts of so many tokens: what fits in the GPUs' memory, within reason.

    Devices that stand for GPUs count as those; one CPU device has the machine's memory, which is not asked.
    """
    engine = opened.engine
    most = PROMPTS_OF_A_GROUP * engine.layout.groups
    if engine.mesh.size == 1 and opened.simulated:
        return most
    from kimi_jax.estimator.advice import most_requests

    return min(most, most_requests(load_of(opened, 1, context)))


def load_of(opened: Opened, requests: int, context: int) -> "Scenario":
    """The run as the estimator takes it."""
    from kimi_jax.estimator.advice import scenario_of

    engine = opened.engine
    drafter = None if engine.drafter is None else engine.drafter.config
    return scenario_of(opened.machine, opened.gpu, engine.config, drafter, requests=requests, context=context)


def advice_of(opened: Opened, options: Options, batch: int, context: int, report: "Report") -> str | None:
    """Another layout or budget, where the estimator has a faster one for this load; None for the bundled model, which
    no cluster is bought for, and for one device."""
    if opened.engine.mesh.size == 1 or options.checkpoint.resolve() == BUNDLED_CHECKPOINT:
        return None
    from kimi_jax.estimator.advice import better

    return better(load_of(opened, batch, context), 1 + report.nodes_per_round)


def run(args: Sequence[str], prog: str | None = None) -> None:
    """Parses `args` and runs the command; `prog` is what its help calls it."""
    main(parse(Options, args, prog, __doc__))
