"""Device selection. What must happen before jax starts its backends runs in a process of its own."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from meshes import DeviceError, build_mesh, preset, select_devices, topology_devices
from meshes.devices import visible_gpu_count
from meshes.presets import LayoutError


def run(code: str) -> subprocess.CompletedProcess:
    """Run Python as a user would: nothing in the environment speaks of jax."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_simulated_mesh_is_quiet_and_in_order():
    result = run(
        "import json, meshes\n"
        "preset = meshes.preset('nvl72')\n"
        "chosen = meshes.select_devices(preset, simulated=True)\n"
        "mesh = meshes.build_mesh(preset, chosen.devices[::-1])\n"
        "again = len(meshes.simulate(8))\n"
        "try: meshes.simulate(100)\n"
        "except meshes.DeviceError as error: late = str(error)\n"
        "print(json.dumps([chosen.notice, chosen.simulated, dict(mesh.shape), mesh.axis_names,\n"
        "    [d.id for d in mesh.devices[0, 1]], again, late]))"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    notice, simulated, shape, names, second_row, again, late = json.loads(result.stdout)
    assert notice == "nvl72: dp 1 × ep 9 × tp 8, simulated on 72 CPU devices"
    assert simulated is True
    assert shape == {"dp": 1, "ep": 9, "tp": 8}
    assert names == ["dp", "ep", "tp"]
    assert second_row == list(range(8, 16))
    assert again == 72
    assert "100 CPU devices wanted, but jax has already started with 72" in late


@pytest.mark.skipif(visible_gpu_count() > 0, reason="about a machine without a GPU")
def test_nothing_noisy_without_a_gpu():
    result = run(
        "import meshes\nprint(meshes.select_devices(meshes.preset('local')).notice)\n"
        "import jax\nprint(jax.default_backend(), jax.numpy.ones(3).sum())"
    )
    assert result.stderr == ""
    assert result.stdout == "local: dp 1 × ep 1 × tp 1, simulated on 1 CPU device\ncpu 3.0\n"


@pytest.mark.parametrize(
    ("name", "card", "kind"),
    [("nvl72", "gb300", "NVIDIA GB300"), pytest.param("hgx-ib-16", "h200", "NVIDIA H200", marks=pytest.mark.slow)],
)
def test_a_sharded_program_compiles_for_gpus_that_are_not_there(name, card, kind):
    pytest.importorskip("jax_plugins", reason="needs jax's CUDA plugin")
    result = run(
        "import json, meshes\n"
        f"preset = meshes.preset({name!r})\n"
        f"devices = meshes.topology_devices(preset, {card!r})\n"
        "mesh = meshes.build_mesh(preset, devices)\n"
        "import jax, jax.numpy as jnp\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "rows = 4 * mesh.shape['ep']\n"
        "def array(shape, *spec):\n"
        "    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))\n"
        "program = jax.jit(lambda x, w: jnp.tanh(x @ w), out_shardings=NamedSharding(mesh, P(('dp', 'ep'))))\n"
        "compiled = program.lower(array((rows, 7168), ('dp', 'ep'), 'tp'), array((7168, 2048), 'tp')).compile()\n"
        "print(json.dumps([len(devices), devices[0].device_kind, compiled.as_text(),\n"
        "    compiled.memory_analysis().argument_size_in_bytes]))"
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    count, found, hlo, argument_bytes = json.loads(result.stdout)
    gpus = preset(name).layout.num_devices
    assert (count, found) == (gpus, kind)
    assert f"replica_groups=[{gpus // 8},8]<=[{gpus}]" in hlo
    assert argument_bytes == 4 * (7168 // 8) * 2 + (7168 // 8) * 2048 * 2


def fake_gpus(monkeypatch, count: int, kind: str):
    import jax

    gpus = [SimpleNamespace(device_kind=kind, id=i, process_index=i // 8, slice_index=i // 8) for i in range(count)]
    monkeypatch.setattr("meshes.devices.visible_gpu_count", lambda: min(count, 8))
    monkeypatch.setattr(jax, "devices", lambda platform=None: gpus)


def test_gpus_are_checked_by_number_and_kind(monkeypatch):
    fake_gpus(monkeypatch, 16, "NVIDIA H200")
    chosen = select_devices(preset("hgx-ib-16"))
    assert chosen.simulated is False
    assert chosen.notice == "hgx-ib-16: dp 1 × ep 2 × tp 8 on 16 × NVIDIA H200"
    with pytest.raises(DeviceError, match="needs 24 GPUs; this machine has 16 × NVIDIA H200"):
        select_devices(preset("hgx-ib-24"))
    with pytest.raises(
        DeviceError, match="nvl72 is made of NVIDIA GB300, NVIDIA GB200; this machine has 16 × NVIDIA H200"
    ):
        select_devices(preset("nvl72"))


def test_a_grace_card_is_not_taken_for_its_hgx_sister(monkeypatch):
    fake_gpus(monkeypatch, 8, "NVIDIA GB300")
    with pytest.raises(DeviceError, match="hgx-ib-8 is made of NVIDIA B300"):
        select_devices(preset("hgx-ib-8"))


def test_mesh_groups_gpus_of_one_domain_whatever_their_order():
    # Two nodes whose processes joined in turn: ids alternate between the nodes.
    gpus = [SimpleNamespace(id=i, process_index=i, slice_index=i % 2) for i in range(16)]
    mesh = build_mesh_without_jax(preset("hgx-ib-16"), gpus)
    assert [{gpu.slice_index for gpu in row} for row in mesh[0]] == [{0}, {1}]
    with pytest.raises(DeviceError, match="needs 16 devices; 8 given"):
        build_mesh(preset("hgx-ib-16"), gpus[:8])


def build_mesh_without_jax(machine, devices):
    """The device array that `build_mesh` hands to jax, which takes real devices only."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.sharding, "Mesh", lambda array, names: array)
        return build_mesh(machine, devices)


def test_processes_must_share_the_devices_evenly():
    with pytest.raises(DeviceError, match="72 devices, which 5 processes cannot share"):
        select_devices(preset("nvl72"), simulated=True, num_processes=5)


def test_a_machine_of_the_wrong_gpu_is_no_compile_target():
    with pytest.raises(LayoutError, match="nvl72 is made of gb300, gb200, not of h100"):
        topology_devices(preset("nvl72"), "h100")
