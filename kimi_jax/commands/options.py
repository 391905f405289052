"""The options that several commands take, each declared once: machine and layout, checkpoint, drafter, processes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard, get_args, get_type_hints

import tyro
from rich.console import Console

from kimi_jax.commands import defaults
from kimi_jax.opening import BUNDLED_CHECKPOINT, Dtype, drafter_of
from kimi_jax.parallel.processes import ProcessOptions
from meshes.hardware import GPUS
from meshes.presets import CacheSplit, ExpertSplit, Preset, preset

if TYPE_CHECKING:
    from kimi_jax.decoding.engine import Draft


def option(metavar: str | None = None, help: str | None = None, **more: Any) -> Any:
    """An option's name for its value, and its help."""
    return tyro.conf.arg(metavar=metavar, help=help, **more)


Count = Annotated[int | None, option("N")]
OptionalFile = Annotated[Path | None, option("FILE")]
OptionalFolder = Annotated[Path | None, option("DIR")]
Files = Annotated[tuple[Path, ...], tyro.conf.Positional, option("FILE ...")]

Checkpoint = Annotated[
    Path,
    tyro.conf.arg(
        metavar="DIR",
        help="Checkpoint in K2.6's own format (config.json, safetensors shards with their index, tiktoken.model) or "
        "sharded by `convert`; a folder, or a name on the hub, owner/name or owner/name@revision.",
    ),
]
Drafter = Annotated[
    Path | None,
    option("DIR", "DFlash drafter made for the checkpoint, a folder or a name on the hub; the bundled checkpoint has a "
           "bundled one, and any other decodes plainly without."),
]  # fmt: skip
Config = Annotated[Path | None, option("PATH", "Folder or config.json of another model of the family than K2.6.")]
DrafterConfigFile = Annotated[
    Path | None, option("PATH", "Folder or config.json of another DFlash drafter than the public Kimi drafter.")
]
Gpu = Annotated[str | None, option("NAME", f"Card: {', '.join(GPUS)}; by default the machine's usual one.")]
Dp = Annotated[int | None, option("N", "Replicas with weights of their own.")]
Ep = Annotated[int | None, option("N", "Ranks that share the experts and split the batch.")]
Tp = Annotated[int | None, option("N", "Ranks that split heads and widths.")]
Cache = Annotated[
    CacheSplit | None,
    option("{copied,split}", "copied: the latent cache whole on every tp rank. split: over them by position, for long "
           "contexts."),
]  # fmt: skip
Batch = Annotated[int, tyro.conf.arg(metavar="N", aliases=["--concurrency"])]
"""Requests together in the whole machine."""
Batches = Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...", aliases=["--concurrencies"])]
Flag = Annotated[bool, option()]
Images = Annotated[tuple[Path, ...], tyro.conf.UseAppendAction, option("FILE")]
Json = Annotated[bool, option(help="Print one JSON object instead of text and tables.")]
Wide = Annotated[bool, option(help="Tables with all their columns, for more than 80 columns of text.")]
NoCache = Annotated[
    bool, option(help="Compile everything anew: use none of the programs that earlier runs left in the cache folder.")
]


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """The machine and how the model lies on it. What is not given is the preset's."""

    mesh: Annotated[
        str | None,
        option("NAME", "Machine: local (up to 8 GPUs of one node), hgx-ib-N (N GPUs in nodes of 8; hgx-ib is 16), "
               "nvl36, nvl72, or nvl72xN (N racks); simulated "
               "without GPUs."),
    ] = "local"  # fmt: skip
    dp: Dp = None
    ep: Ep = None
    tp: Tp = None
    experts: Annotated[ExpertSplit | None, option("{slots,width}")] = None
    """slots: whole experts over ep and tp. width: experts over ep, and each one's width over tp."""
    exchange: Annotated[str | None, option("NAME")] = None
    """How rows reach experts on other ep ranks: allgather, hierarchical (the same, once for all tp ranks, for ep over a
    network), alltoall, ragged, or auto, which takes one of the first three by the machine and the rows of a step.
    ragged is for GPUs, and has known problems (docs/parallel.md)."""
    cache: Cache = None

    def preset(self, default: str = "local") -> Preset:
        """The machine, by default the one named, with the options applied.

        Raises:
          LayoutError: naming what works.
        """
        if self.exchange is not None:
            from kimi_jax.parallel.exchange import backend  # imports jax

            backend(self.exchange)
        return preset(self.mesh or default).with_options(
            dp=self.dp, ep=self.ep, tp=self.tp, experts=self.experts, exchange=self.exchange, cache=self.cache
        )


LOCAL, NVL72, ANY = LayoutOptions(), LayoutOptions("nvl72"), LayoutOptions(None)
"""Where a command runs by default; with `ANY` the command decides where no machine is named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """A checkpoint on a machine."""

    checkpoint: Checkpoint = BUNDLED_CHECKPOINT
    layout: LayoutOptions = LOCAL
    dtype: Dtype = "auto"
    """Type of activations and dense weights; auto is bfloat16 on GPUs and float32 on simulated meshes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(CheckpointOptions):
    """A checkpoint on a machine, and the processes that run it."""

    processes: ProcessOptions = dataclasses.field(default_factory=ProcessOptions)
    placement: OptionalFile = None
    """JSON file that says which experts lie where, as decode --save-placement writes; by default in order, or as a
    sharded checkpoint has them."""
    workers: int = 8
    """Threads of each process that read the checkpoint; network storage often wants more."""
    no_cache: NoCache = False

    @property
    def uses_cache(self) -> bool:
        """Whether compiled programs are kept for later runs, and those of earlier ones used."""
        return not self.no_cache

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts that begin alike share what they have in common."""
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterOptions(EngineOptions):
    """A checkpoint and its drafter."""

    drafter: Drafter = None
    no_prefix_cache: Annotated[bool, option(help="Run every prompt from its first token, also where one before it "
                                                 "begins alike.")] = False  # fmt: skip

    @property
    def shares_prefixes(self) -> bool:
        return not self.no_prefix_cache

    def known_drafter(self, console: Console) -> Path | None:
        """The drafter that was named or the bundled checkpoint's own; where there is none, the console is told."""
        found = drafter_of(self.checkpoint, self.drafter)
        if found is None:
            told = f"{self.checkpoint} decodes plainly: --drafter DIR names a drafter made for it"
            console.print(told, style="dim", highlight=False)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationOptions(DrafterOptions):
    """A checkpoint, its drafter, and how the drafts are used."""

    speculation: Annotated[Literal["none", "chain", "ddtree"] | None, option("{none,chain,ddtree}")] = None
    """Draft nothing, the drafter's best chain, or its best tree; ddtree wherever there is a drafter."""
    budget: int | Literal["auto"] = "auto"
    """Draft tree nodes verified each round; cheap are 7, 15, 23, 31 and 63, which with the root are multiples of eight
    rows. auto picks them for every dispatch by what rounds cost, measured here or estimated for a simulated machine,
    and by what drafts brought so far; it drafts nothing where that does not pay."""
    keep_chain: Flag = False
    """Always verify the drafter's best chain, and spend the rest of the budget on the best other prefixes."""
    share_budget: Flag = False
    """Verify the best prefixes over all prompts of a device group instead of the same number for each."""

    def used_drafter(self, console: Console) -> Path | None:
        """The drafter that is loaded.

        Raises:
          ValueError: where speculation is asked for and there is none.
        """
        if self.speculation == "none":
            return None
        if self.speculation is None:
            return self.known_drafter(console)
        found = drafter_of(self.checkpoint, self.drafter)
        if found is None:
            raise ValueError(
                f"--speculation {self.speculation} needs --drafter DIR: a drafter made for {self.checkpoint}"
            )
        return found

    def draft(self, drafter: Path | None, synthetic_acceptance: float | None = None) -> "Draft":
        """How an engine with this drafter, or without one, drafts."""
        from kimi_jax.decoding.engine import Draft

        kind = self.speculation or ("none" if drafter is None else "ddtree")
        return Draft(kind, self.budget, self.keep_chain, self.share_budget, synthetic_acceptance)


CONFIG = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff)
"""Names of nested options are their own, and a flag has one form."""


def parse[T](form: type[T], args: Sequence[str], prog: str | None, description: str | None) -> T:
    """The options in `args`; `prog` is what the help calls the command."""
    defaults.tell(form)
    return tyro.cli(form, prog=prog, args=args, description=description, config=CONFIG)


def dispatch(
    commands: Mapping[str, Callable[..., Any]], args: Sequence[str], prog: str | None, description: str | None
) -> None:
    """Runs the subcommand that `args` begins with; each takes the options of one form, or options of its own."""
    named = {name: _without_group(command) for name, command in commands.items()}
    tyro.extras.subcommand_cli_from_dict(named, prog=prog, args=args, description=description, config=CONFIG)


def _without_group(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with its form's options among the others in its help, not in a group that bears the form's name."""
    defaults.tell_parameters(command)
    form = get_type_hints(command).get("options")
    if form is None:
        return command

    def run(options: Any) -> Any:
        return command(options)

    run.__annotations__ = {"options": Annotated[form, tyro.conf.arg(name="")]}
    run.__doc__ = command.__doc__
    return run


def changed(options: EngineOptions, values: Sequence[str]) -> EngineOptions:
    """Where a checkpoint runs, with some options said anew as NAME=VALUE; another mesh brings its own axes.

    What is no option, or does not fit one, ends the program as on the command line.

    Raises:
      ValueError: a value without its name.
    """
    own = EngineOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(EngineOptions)})
    pairs = [value.partition("=") for value in values]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ValueError(f"{wrong[0]}: expected NAME=VALUE, such as mesh=nvl72")
    if "mesh" in [name for name, *_ in pairs]:
        own = dataclasses.replace(own, layout=dataclasses.replace(own.layout, dp=None, ep=None, tp=None))
    args = [part for name, _, value in pairs for part in (f"--{name}", value)]
    return tyro.cli(EngineOptions, args=args, default=own, config=CONFIG, prog="--other")


def flat(form: type) -> dict[str, Any]:
    """The types of a form's options by name, those of nested groups included."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(form).items():
        found |= flat(hint) if _is_group(hint) else {name: hint}
    return found


def _is_group(hint: Any) -> TypeGuard[type]:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def of_values[T](form: type[T], values: Mapping[str, Any]) -> T:
    """A form from values by name, those of nested groups included; what is not given has its default."""
    given: dict[str, Any] = {}
    for name, hint in get_type_hints(form).items():
        if _is_group(hint):
            group = {own: values[own] for own in flat(hint) if own in values}
            given |= {name: of_values(hint, group)} if group else {}
        elif name in values:
            is_path = isinstance(values[name], str) and (hint is Path or Path in get_args(hint))
            given[name] = Path(values[name]) if is_path else values[name]
    return form(**given)
