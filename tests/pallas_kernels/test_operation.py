"""The contract: every implementation of every operation goes through its operation's table, here."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.operation import Choice, Device, Implementation, Tolerance, differences, self_check
from pallas_kernels.registry import OPERATIONS

CORES = 3
CARDS = {"hopper": Device("NVIDIA H200", "9.0", CORES), "blackwell": Device("NVIDIA GB300", "10.3", CORES)}
CPU = Device("cpu", "", 1)
BY_NAME = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def interpreter() -> plgpu.InterpretGPUParams:
    return plgpu.InterpretGPUParams(detect_races=True)


def table():
    for operation in OPERATIONS.values():
        for implementation in ("reference", *operation.implementations):
            for name, case in operation.cases.items():
                if not operation.serves(implementation, case):
                    continue
                marks = [pytest.mark.slow] if case.slow and implementation != "reference" else []
                yield pytest.param(
                    operation, implementation, case, id=f"{operation.name}-{implementation}-{name}", marks=marks
                )


@pytest.mark.parametrize(("operation", "implementation", "case"), list(table()))
def test_every_implementation_computes_every_case(operation, implementation, case, oracles):
    known = operation.implementations.get(implementation)
    device = CARDS[known.architectures[-1]] if known else CPU
    choice = operation.choose(case.shape, jnp.bfloat16, device, implementation, case.options)
    assert choice.implementation == implementation
    arguments = operation.problem(case.shape, **case.problem)
    got = jax.jit(lambda *a: operation.run(choice, *a, interpret=interpreter() if known else None))(*arguments)
    found = differences(got, oracles[operation.name](*arguments))
    assert [tolerance.exceeded(error) for tolerance, error in zip(operation.tolerances, found, strict=True)] == [
        [] for _ in found
    ], found


@BY_NAME
def test_every_implementation_serves_a_case_and_a_check(operation):
    for implementation in operation.implementations:
        for cases in (operation.cases, operation.checks):
            assert any(operation.serves(implementation, case) for case in cases.values()), implementation


@BY_NAME
def test_the_table_has_shapes_and_cases_of_one_kind(operation):
    kinds = {type(case.shape) for case in (operation.cases | operation.checks).values()}
    assert kinds | {type(shape) for shape in operation.shapes.values()} == kinds
    assert len(kinds) == 1


KINDS = {
    "NVIDIA H100 80GB HBM3": "hopper",
    "NVIDIA H200": "hopper",
    "NVIDIA H20": "hopper",
    "NVIDIA H800": "hopper",
    "NVIDIA GH200 480GB": "hopper",
    "NVIDIA B100": "blackwell",
    "NVIDIA B200": "blackwell",
    "NVIDIA GB200": "blackwell",
    "NVIDIA B300 SXM6 AC": "blackwell",
    "NVIDIA GB300": "blackwell",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": None,
    "NVIDIA A100-SXM4-80GB": None,
}


@BY_NAME
@pytest.mark.parametrize(("kind", "architecture"), KINDS.items())
def test_a_mesh_for_compiling_gets_the_same_answer_from_both(operation, kind, architecture):
    abstract = jax.sharding.AbstractDevice(device_kind=kind, num_cores=100, platform="gpu")
    mesh = jax.sharding.AbstractMesh((2,), ("dp",), (jax.sharding.AxisType.Auto,), abstract_device=abstract)
    assert Device.current().architecture is None
    with jax.sharding.use_abstract_mesh(mesh):
        device = Device.current()
    assert (device.kind, device.cores, device.architecture) == (kind, 100, architecture)
    shape = next(iter(operation.shapes.values()))
    choice = operation.choose(shape, jnp.bfloat16, device)
    if architecture:
        assert choice.implementation == operation.prefer(shape, device)
        assert architecture in operation.implementations[choice.implementation].architectures
    else:
        assert (choice.implementation, choice.config) == ("reference", None)
    assert kind in choice.reason


@dataclasses.dataclass
class Card:
    """A device as jax shows a real one: it knows its own compute capability."""

    device_kind: str
    compute_capability: str
    core_count: int = 132
    platform: str = "gpu"


def test_a_device_that_knows_its_capability_is_believed():
    assert Device.of(Card("NVIDIA H900", "9.0")).architecture == "hopper"
    assert Device.of(Card("NVIDIA H200", "9.0")) == Device("NVIDIA H200", "9.0", 132)
    assert Device.of(Card("NVIDIA Thor", "11.0")).architecture is None
    assert Device.of(jax.devices("cpu")[0]) == CPU


@BY_NAME
@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (CPU, jnp.bfloat16, "cpu has no kernel"),
        (Device("NVIDIA A100", "8.0", 108), jnp.bfloat16, r"compute capability 8\.0"),
        (CARDS["hopper"], jnp.float32, "are float32"),
    ],
)
def test_what_no_kernel_serves_goes_to_the_reference_or_is_an_error_by_name(operation, device, dtype, reason):
    shape = next(iter(operation.shapes.values()))
    choice = operation.choose(shape, dtype, device)
    assert choice.implementation == "reference"
    assert re.search(reason, choice.reason)
    with pytest.raises(ValueError, match=f"{operation.name} cannot use 'hopper': .*{reason}"):
        operation.choose(shape, dtype, device, "hopper")


@BY_NAME
def test_names_are_checked(operation):
    shape = next(iter(operation.shapes.values()))
    with pytest.raises(ValueError, match="unknown implementation 'flash': give one of auto, reference, "):
        operation.choose(shape, jnp.bfloat16, CPU, "flash")
    with pytest.raises(ValueError, match="NVIDIA H200 is not Blackwell"):
        operation.choose(shape, jnp.bfloat16, CARDS["hopper"], "blackwell")
    assert operation.choose(shape, jnp.bfloat16, CARDS["hopper"], "reference").implementation == "reference"


@BY_NAME
def test_arrays_tracked_over_mesh_axes_are_refused_with_the_remedy(operation):
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("dp")
    case = next(iter(operation.cases.values()))
    choice = operation.choose(case.shape, jnp.bfloat16, CARDS["hopper"], "hopper")

    def call(arguments):
        return operation.run(choice, *arguments)

    with pytest.raises(ValueError, match="give shard_map check_vma=False"):
        jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec), operation.problem(case.shape))


def test_differences_and_tolerances():
    want = np.array([[3.0, 4.0], [0.0, 0.0], [-np.inf, 1.0]])
    (same,) = differences(want, want)
    assert (same.frobenius, same.largest, same.absolute) == (0, 0, 0)
    (found,) = differences(want + np.array([[0.0, 0.5], [0.0, 0.0], [0.0, 0.0]]), want)
    assert found.frobenius == pytest.approx(0.5 / np.sqrt(26))
    assert found.largest == pytest.approx(0.5 / np.sqrt(12.5))
    assert found.absolute == pytest.approx(0.5)
    assert Tolerance(absolute=0.6).exceeded(found) == []
    assert Tolerance(absolute=0.4, frobenius=1).exceeded(found) == ["absolute difference 0.5 (allowed 0.4)"]
    for wrong in (np.nan, np.inf, -np.inf):  # where the reference is finite, and another infinity where it is not
        for place in ((0, 0), (2, 0)):
            spoilt = want.copy()
            spoilt[place] = -wrong
            if not np.array_equal(spoilt, want):
                assert len(Tolerance(1, 1, 1).exceeded(differences(spoilt, want)[0])) == 3
    # Anything where nothing is due.
    (found,) = differences(np.array([[1e-6, 0.0]]), np.zeros((1, 2)))
    assert found.largest == np.inf


def small(operation, spoil=lambda outputs: outputs):
    """One case, on the reference under the names of the kernels: takes no time."""

    def run(config, *arguments, interpret=None):
        return spoil(operation.reference(*arguments))

    kernels = {name: dataclasses.replace(known, run=run) for name, known in operation.implementations.items()}
    case = dataclasses.replace(next(iter(operation.cases.values())), options={})
    return dataclasses.replace(operation, implementations=kernels, checks={"small": case})


@BY_NAME
def test_self_check_takes_every_implementation_of_the_card(operation):
    for architecture, device in CARDS.items():
        checked = self_check(small(operation), device)
        assert {c.choice.implementation for c in checked} == set(operation.available(device))
        assert architecture in operation.available(device)
    assert self_check(operation, CPU) == []


@BY_NAME
@pytest.mark.parametrize("output", [0, -1])
def test_self_check_refuses_one_wrong_element(operation, output):
    def spoil(outputs):
        leaves, tree = jax.tree.flatten(outputs)
        flat = jnp.nan_to_num(leaves[output], neginf=0).reshape(-1)
        wrong = leaves[output].reshape(-1).at[jnp.argmax(jnp.abs(flat))].multiply(1.05)
        leaves[output] = wrong.reshape(leaves[output].shape)
        return jax.tree.unflatten(tree, leaves)

    with pytest.raises(RuntimeError, match=f"{operation.name} is wrong on NVIDIA H200: .*allowed"):
        self_check(small(operation, spoil), CARDS["hopper"])


@BY_NAME
def test_a_new_implementation_is_chosen_run_and_checked(operation):
    """As docs/architecture.md says: an entry is enough."""
    ran = []

    def run(config, *arguments, interpret=None):
        ran.append(config)
        return operation.reference(*arguments)

    new = Implementation(("hopper",), lambda shape, dtype: None, lambda shape, device, **options: device.cores, run)
    case = next(iter(operation.cases.values()))
    extended = dataclasses.replace(
        operation, implementations={**operation.implementations, "new": new}, describe=lambda shape, config: "mine"
    )
    choice = extended.choose(case.shape, jnp.bfloat16, CARDS["hopper"], "new")
    assert choice == Choice("new", CORES, "asked for by name: mine")
    checked = self_check(dataclasses.replace(small(extended), implementations={"new": new}), CARDS["hopper"])
    assert ran == [CORES]
    assert [c.choice.implementation for c in checked] == ["new"]
    with pytest.raises(ValueError, match="NVIDIA GB300 is not Hopper"):
        extended.choose(case.shape, jnp.bfloat16, CARDS["blackwell"], "new")
