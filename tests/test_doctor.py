"""The doctor: each fault is found on a machine that has it, and not on one that is well."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_jax.doctor import Facts, examine, fits
from meshes.environment import settings
from meshes.presets import PRESETS, preset

ROOT = Path(__file__).parents[1]
CUDA12 = {
    "jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-cuda12-plugin": "0.12.0.1", "jax-cuda12-pjrt": "0.12.0.1",
    "nvidia-nccl-cu12": "2.32.3",
}  # fmt: skip
TRAY = Facts(
    python="3.12.1", packages=CUDA12, driver="580.65.06", ptxas="12.9.86", gpus=4, gpu_kinds=("NVIDIA GB300",) * 4,
    gpu_bytes=int(270e9), gpu_error=None, host_bytes=int(900e9), host_free_bytes=int(800e9), cores=144,
    shared_memory_bytes=8 << 30, environment={}, flags_error=None, imex=True, infiniband=False,
)  # fmt: skip
HGX = dataclasses.replace(
    TRAY, gpus=8, gpu_kinds=("NVIDIA B300 SXM6 AC",) * 8, imex=False, infiniband=True, driver="575.57.08"
)


def faults(facts, machine=None):
    return [finding.what for finding in examine(facts, machine) if finding.level == "fault"]


def test_machines_that_are_well():
    assert faults(TRAY) == faults(TRAY, preset("nvl72")) == []
    assert faults(HGX) == faults(HGX, preset("hgx-ib-72")) == []
    nothing = dataclasses.replace(TRAY, gpus=0, gpu_kinds=(), gpu_bytes=None, driver=None, imex=False)
    assert faults(nothing) == faults(nothing, preset("nvl72")) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"packages": CUDA12 | {"nvidia-nccl-cu13": "2.32.3"}}, "two NCCL wheels"),
        ({"packages": CUDA12 | {"jax-cuda13-plugin": "0.12.0.1"}, "driver": "590.1"}, "installed together"),
        ({"packages": CUDA12 | {"jax-cuda12-plugin": "0.11.2"}}, r"jax-cuda12-plugin 0.11.2 with jaxlib 0.12.0.1"),
        ({"packages": CUDA12 | {"jax": "0.10.1"}}, "jax 0.10.1; the project runs on"),
        ({"packages": {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}}, "4 GPUs, and no CUDA plugin"),
        ({"driver": "520.61.05"}, "driver 520.61.05 is too old for CUDA 12, which needs 525"),
        ({"driver": "570.86.15"}, "driver 570.86.15 is too old for NVIDIA GB300, which needs 575"),
        ({"gpu_kinds": ("NVIDIA B200",) * 4, "driver": "565.57.01"}, "too old for NVIDIA B200, which needs 570"),
        ({"gpu_kinds": ("NVIDIA RTX PRO 6000 Blackwell",) * 4, "driver": "550.1"}, "Blackwell, which needs 570"),
        ({"ptxas": "12.8.61"}, "ptxas 12.8.61 miscompiles masked attention"),
        ({"ptxas": "12.9.41"}, "ptxas 12.9.41 miscompiles masked attention"),
        ({"gpu_error": "cuInit failed", "gpu_kinds": ()}, "shows 4 GPUs and jax finds none: cuInit failed"),
        ({"environment": {"JAX_PLATFORMS": "cpu"}}, "JAX_PLATFORMS is cpu"),
        ({"flags_error": "Unknown flag"}, "refuses XLA_FLAGS: Unknown flag"),
        ({"shared_memory_bytes": 64 << 20}, r"/dev/shm has 0.06 GiB"),
    ],
)
def test_faults_are_found_and_come_with_a_fix(change, words):
    sick = dataclasses.replace(TRAY, **change)
    first = examine(sick)[0]
    assert first.level == "fault"
    assert first.fix
    assert any(re.search(words, fault) for fault in faults(sick))


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        ("NVIDIA H200", "525.60.13"),
        ("NVIDIA GH200 480GB", "535.1"),
        ("NVIDIA GB200", "570.1"),
        ("NVIDIA B300", "575.1"),
    ],
)
@pytest.mark.parametrize("ptxas", [None, "12.6.85", "12.9.86", "13.0.48"])
def test_drivers_and_assemblers_that_are_new_enough(kind, driver, ptxas):
    assert faults(dataclasses.replace(TRAY, gpu_kinds=(kind,) * 4, driver=driver, ptxas=ptxas)) == []


@pytest.mark.parametrize(
    ("facts", "machine", "words"),
    [
        (dataclasses.replace(TRAY, imex=False), "nvl72", "NVLink does not reach the other trays"),
        (dataclasses.replace(HGX, infiniband=False), "hgx-ib-16", "over TCP"),
        (dataclasses.replace(HGX, gpus=1, gpu_kinds=HGX.gpu_kinds[:1]), "hgx-ib-16", "has 8 GPUs, here 1 are visible"),
        (TRAY, "hgx-ib-16", "made of NVIDIA B300"),
    ],
)
def test_what_a_node_lacks(facts, machine, words):
    assert any(words in fault for fault in faults(facts, preset(machine)))


def test_settings_that_are_missing_are_named_until_they_are_set():
    machine = preset("nvl72")
    (note,) = examine(TRAY, machine)
    assert all(setting.name in note.what for setting in settings(machine))
    flags = " ".join(str(s) for s in settings(machine) if s.is_xla_flag)
    variables = {s.name: s.value for s in settings(machine) if not s.is_xla_flag}
    assert examine(dataclasses.replace(TRAY, environment={"XLA_FLAGS": flags, **variables}), machine) == []


def test_presets_against_devices():
    runs = {fit.preset: fit.runs for fit in fits(HGX)}
    assert runs["hgx-ib-8"] == "on its GPUs"
    assert runs["local"] == "on its GPUs, for models smaller than K2.6"
    assert runs["hgx-ib-72"] == "one of 9 nodes"
    assert runs["nvl72"] == "made of gb300, gb200"
    sizes = {fit.preset: fit.weight_bytes for fit in fits(TRAY)}
    assert sizes.keys() == PRESETS.keys()
    assert round(sizes["hgx-ib-16"] / 1e9, 3) == 40.510  # docs/checkpoints.md, from the tensors' headers
    assert round(sizes["nvl72"] / 1e9, 3) == 13.756


@pytest.mark.slow
def test_the_script_reports_refused_flags_and_hides_the_environment():
    environment = os.environ | {"XLA_FLAGS": "--xla_gpu_no_such_flag=1", "MY_SECRET": "hidden"}
    result = subprocess.run(
        [sys.executable, "scripts/doctor.py", "--json"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert "--xla_gpu_no_such_flag" in report["findings"][0]["what"]
    assert {pick["operation"] for pick in report["operations"]} >= {"experts", "attention"}
    assert "hidden" not in result.stdout
