"""The contract that every operation keeps: its device, its choice with a reason, its implementations, its self-check.

An operation has a plain JAX reference, which is its specification and runs anywhere, and implementations for some
cards. `Operation.choose` picks one for a shape on a device and says why; `Operation.cases` is the table of small
problems that the tests take every implementation through; `self_check` compares them on the device at hand.
"""

import concurrent.futures
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu

Architecture = Literal["hopper", "blackwell"]
ARCHITECTURES: dict[str, Architecture] = {"9.0": "hopper", "10.0": "blackwell", "10.3": "blackwell"}
"""Of the compute capabilities that kernels are written for."""
# A mesh in context names its card without saying what it can compute.
_CAPABILITIES = {
    "9.0": re.compile(r"\b(GH200|H20|H100|H200|H800)\b"),
    "10.0": re.compile(r"\bG?B(100|200)\b"),
    "10.3": re.compile(r"\bG?B300\b"),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What a program is compiled for. `capability` is the compute capability, "" where it is not known or no GPU."""

    kind: str
    capability: str
    cores: int
    """Streaming multiprocessors; 1 for what is no GPU."""

    @classmethod
    def of(cls, device: Any) -> "Device":
        """A jax device, one that programs are only compiled for, or the abstract device of a mesh."""
        kind, cores = device.device_kind, getattr(device, "core_count", None) or getattr(device, "num_cores", None)
        if device.platform not in ("gpu", "cuda"):
            return cls(kind, "", 1)
        capability = getattr(device, "compute_capability", None)
        if capability is None:
            by_name = (c for c, pattern in _CAPABILITIES.items() if pattern.search(kind))
            present = (d.compute_capability for d in jax.local_devices() if d.device_kind == kind)
            capability = next(by_name, None) or next(present, "")
        return cls(kind, capability, cores or 1)

    @classmethod
    def current(cls) -> "Device":
        """The device of the mesh in context, real or for compiling only; without a mesh, jax's default device."""
        abstract = jax.sharding.get_abstract_mesh().abstract_device
        if abstract is not None:
            return cls.of(abstract)
        default = jax.config.jax_default_device
        return cls.of(jax.devices(default)[0] if default is None or isinstance(default, str) else default)

    @property
    def architecture(self) -> Architecture | None:
        """The family of cards that kernels are written for, None where there are none for this device."""
        return ARCHITECTURES.get(self.capability)


@dataclasses.dataclass(frozen=True)
class Choice[Config]:
    """What serves a call: an implementation, its launch parameters (None for the reference), and the reason."""

    implementation: str
    config: Config | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Implementation[Shape, Config]:
    """One way to compute an operation on some cards. Only `run` needs Mosaic, which takes a second to import.

    `obstacle(shape, dtype)` says why it cannot serve a call, None where it can. `configure(shape, device, **options)`
    gives its launch parameters; the options replace what it would choose, and those of other implementations are
    ignored. `run(config, *arguments, interpret=None, **keywords)` gives the reference's outputs.
    """

    architectures: tuple[Architecture, ...]
    obstacle: Callable[[Shape, jnp.dtype], str | None]
    configure: Callable[..., Config]
    run: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case[Shape]:
    """One small problem of the table: a shape, what is special about its values, and launch parameters to force."""

    shape: Shape
    problem: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    slow: bool = False
    """Whether the interpreter takes too long over it for a default run of the tests."""
    only: tuple[str, ...] = ()
    """Implementations that it is for; empty where it is for all."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far an output is from the reference's in float32. NaN where what is finite in one is not in the other."""

    frobenius: float
    """Norm of the difference over the norm of the reference's output."""
    largest: float
    """Largest difference of an element, in units of the root mean square of its row (the last axis)."""
    absolute: float
    """Largest difference of an element."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The largest `Difference` of an output that rounding explains."""

    frobenius: float = float("inf")
    largest: float = float("inf")
    absolute: float = float("inf")

    def exceeded(self, difference: Difference) -> list[str]:
        """What is larger than allowed, in words; empty where all is well. A NaN exceeds every bound."""
        return [
            f"{name} difference {found:.2g} (allowed {allowed:.2g})"
            for name, allowed in dataclasses.asdict(self).items()
            if allowed != float("inf") and not (found := getattr(difference, name)) <= allowed
        ]


@dataclasses.dataclass(frozen=True)
class Operation[Shape, Config]:
    """An operation: what it computes, what may compute it, and how it is tried.

    `tolerances` has a bound for each output of `reference(*arguments)`. `problem(shape, seed=0, **case.problem)` makes
    random arguments.
    """

    name: str
    reference: Callable[..., Any]
    implementations: Mapping[str, Implementation[Shape, Config]]
    prefer: Callable[[Shape, Device], str]
    """Name of the implementation that "auto" takes on a device whose architecture has some."""
    describe: Callable[[Shape, Config], str]
    """What made the launch parameters what they are, in words."""
    problem: Callable[..., tuple[Any, ...]]
    tolerances: tuple[Tolerance, ...]
    necessary: Callable[[Shape, tuple[Any, ...]], tuple[float, float]]
    """Bytes that must be read from memory once, and multiplications and additions, of a call on a problem."""
    read_in_place: tuple[int, ...]
    """Arguments that no program may copy: weights and caches."""
    shapes: Mapping[str, Shape]
    """Kimi K2.6's sizes on a device: what is compiled for absent cards, and timed on present ones."""
    cases: Mapping[str, Case[Shape]]
    checks: Mapping[str, Case[Shape]]
    """What `self_check` runs on a card."""

    def choose(
        self,
        shape: Shape,
        dtype: DTypeLike,
        device: Device,
        implementation: str = "auto",
        options: Mapping[str, Any] | None = None,
    ) -> Choice[Config]:
        """The implementation of local (per-device) sizes on a device.

        "auto" takes what is preferred on the card where that can serve the call, else the reference, and says why.

        Raises:
          ValueError: the implementation is unknown, or was asked for by name and cannot serve this call.
        """
        names = ("auto", "reference", *self.implementations)
        if implementation not in names:
            raise ValueError(f"unknown implementation {implementation!r}: give one of {', '.join(names)}")
        if implementation == "reference":
            return Choice("reference", None, "asked for by name")
        by_name = implementation != "auto"
        if device.architecture is None:
            capability = f" (compute capability {device.capability})" if device.capability else ""
            obstacle = f"{device.kind}{capability} has no kernel: they are for capabilities {', '.join(ARCHITECTURES)}"
        else:
            implementation = implementation if by_name else self.prefer(shape, device)
            known = self.implementations[implementation]
            if device.architecture not in known.architectures:
                obstacle = f"{device.kind} is not {' or '.join(known.architectures).capitalize()}"
            else:
                obstacle = known.obstacle(shape, jnp.dtype(dtype))
        if obstacle and by_name:
            raise ValueError(f"{self.name} cannot use {implementation!r}: {obstacle}")
        if obstacle:
            return Choice("reference", None, obstacle)
        config = self.implementations[implementation].configure(shape, device, **options or {})
        why = "asked for by name" if by_name else device.kind
        return Choice(implementation, config, f"{why}: {self.describe(shape, config)}")

    def run(
        self,
        choice: Choice[Config],
        *arguments: Any,
        interpret: "plgpu.InterpretGPUParams | None" = None,
        **keywords: Any,
    ) -> Any:
        """Computes as chosen, in Mosaic's interpreter where its parameters are given.

        Raises:
          ValueError: a kernel was given arrays whose variation over mesh axes is tracked.
        """
        if choice.config is None:
            return self.reference(*arguments, **keywords)
        if not all(jax.typeof(array).manual_axis_type.empty for array in jax.tree.leaves(arguments)):
            raise ValueError(
                f"the {choice.implementation} kernel takes no arrays that are tracked as varying over mesh axes: "
                "give shard_map check_vma=False"
            )
        known = self.implementations[choice.implementation]
        return known.run(choice.config, *arguments, interpret=interpret, **keywords)

    def available(self, device: Device) -> list[str]:
        """Names of the implementations for a device's architecture."""
        return [name for name, known in self.implementations.items() if device.architecture in known.architectures]

    def serves(self, implementation: str, case: Case[Shape]) -> bool:
        """Whether a case is for an implementation or the reference, and nothing stands in the way in bfloat16."""
        if case.only and implementation not in case.only:
            return False
        known = self.implementations.get(implementation)
        return known is None or known.obstacle(case.shape, jnp.dtype(jnp.bfloat16)) is None

    def trials(self, device: Device, cases: Mapping[str, Case[Shape]]) -> list[tuple[str, str]]:
        """Pairs of an implementation for the device and the name of a case that it serves."""
        return [
            (implementation, name)
            for implementation in self.available(device)
            for name, case in cases.items()
            if self.serves(implementation, case)
        ]


def differences(got: Any, want: Any) -> list[Difference]:
    """Compares outputs one by one."""
    return [_difference(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]


@jax.jit
def _figures(got: jax.Array, want: jax.Array) -> tuple[jax.Array, ...]:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    same = jnp.all(jnp.isfinite(got) == jnp.isfinite(want)) & jnp.all(jnp.isfinite(want) | (got == want))
    got, want = (jnp.where(jnp.isfinite(want), x, 0) for x in (got, want))
    apart = jnp.abs(got - want)
    rms = jnp.sqrt(jnp.mean(jnp.square(want), axis=-1, keepdims=True))
    largest = jnp.max(jnp.where(apart > 0, apart / rms, 0))
    norm = jnp.linalg.norm(want)
    frobenius = jnp.linalg.norm(apart) / jnp.where(norm == 0, 1, norm)
    return tuple(jnp.where(same, figure, jnp.nan) for figure in (frobenius, largest, jnp.max(apart)))


def _difference(got: Any, want: Any) -> Difference:
    return Difference(*map(float, _figures(jnp.asarray(got), jnp.asarray(want))))


@dataclasses.dataclass(frozen=True)
class Checked:
    """One case that an implementation computed as the reference does."""

    operation: str
    case: str
    choice: Choice
    differences: tuple[Difference, ...]


class Trial:
    """One implementation on one case, ready to be compiled and compared with the reference."""

    def __init__(
        self,
        operation: Operation,
        name: str,
        case: Case,
        device: Device,
        implementation: str = "auto",
        interpret: "plgpu.InterpretGPUParams | None" = None,
    ) -> None:
        self.operation, self.name, self.case, self.device = operation, name, case, device
        choice = self.choice = operation.choose(case.shape, jnp.bfloat16, device, implementation, case.options)
        self.arguments = operation.problem(case.shape, **case.problem)
        self.exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, self.arguments)
        # Lowering is Python, one at a time; compiling is not, and goes on in threads beside it.
        self.kernel = jax.jit(lambda *a: operation.run(choice, *a, interpret=interpret)).lower(*self.arguments)
        self.reference = jax.jit(operation.reference).lower(*self.exact)

    def compile(self) -> "Trial":
        """Compiles both programs."""
        self.run, self.specification = self.kernel.compile(), self.reference.compile()
        return self

    def compare(self) -> Checked:
        """Runs both.

        Raises:
          RuntimeError: an output differs by more than rounding; the message has the figures.
        """
        found = differences(self.run(*self.arguments), self.specification(*self.exact))
        bounds = zip(self.operation.tolerances, found, strict=True)
        if wrong := [text for bound, difference in bounds for text in bound.exceeded(difference)]:
            raise RuntimeError(
                f"{self.operation.name} is wrong on {self.device.kind}: {self.choice.implementation} "
                f"({self.choice.reason}) differs from the reference at {self.name!r}, {self.case.shape}: "
                f"{', '.join(wrong)}. Serve with implementation='reference' and report the card, the driver and the "
                "version of jax."
            )
        return Checked(self.operation.name, self.name, self.choice, tuple(found))


def check(
    operation: Operation,
    name: str,
    case: Case,
    device: Device,
    implementation: str = "auto",
    interpret: "plgpu.InterpretGPUParams | None" = None,
) -> Checked:
    """Compares an implementation with the reference on one case.

    Raises:
      RuntimeError: an output differs by more than rounding; the message has the figures.
    """
    return Trial(operation, name, case, device, implementation, interpret).compile().compare()


def self_check(
    operation: Operation, device: Device | None = None, *, interpret: "plgpu.InterpretGPUParams | None" = None
) -> list[Checked]:
    """Compares every implementation for this device with the reference, before anything relies on them.

    The interpreter proves the kernels' logic, not the silicon, the driver or the assembler that meet them. A device
    without kernels has nothing to check: the list is empty.

    Raises:
      RuntimeError: an implementation differs by more than rounding; do not go on.
    """
    device = device or Device.current()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = [
            pool.submit(Trial(operation, name, operation.checks[name], device, implementation, interpret).compile)
            for implementation, name in operation.trials(device, operation.checks)
        ]
        return [trial.result().compare() for trial in compiled]
