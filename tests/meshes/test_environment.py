"""Settings of machines: what each gets, and that the installed jaxlib takes every flag."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from meshes.environment import exports, settings
from meshes.presets import PRESETS, preset

ONE_SHOT = "--xla_gpu_experimental_use_collective_kernels"
ACROSS_HOSTS = "--xla_gpu_unsupported_use_cross_host_one_shot_kernel"


def names(machine):
    return {setting.name for setting in settings(machine)}


def test_settings_follow_nodes_and_domains():
    assert not names(preset("local")) & {ONE_SHOT, "NCCL_DEBUG", "NCCL_MNNVL_ENABLE"}, "one GPU sends nothing"
    assert names(preset("hgx-ib-72")) >= {ONE_SHOT, "NCCL_DEBUG"}
    assert not names(preset("hgx-ib-72")) & {ACROSS_HOSTS, "NCCL_MNNVL_ENABLE"}, "tp stays in a node, NVLink too"
    assert names(preset("nvl72")) >= {ONE_SHOT, ACROSS_HOSTS, "NCCL_MNNVL_ENABLE"}, "tp 8 is two trays"
    assert ACROSS_HOSTS not in names(preset("nvl36")), "tp 4 is one tray"
    assert not names(preset("nvl72").with_axes(ep=72, tp=1)) & {ONE_SHOT, ACROSS_HOSTS}
    assert not names(preset("hgx-ib-8")) & {"NCCL_DEBUG"}, "one node needs one process"


def test_no_setting_takes_graphs_away():
    """XLA's own list has more than any that was set here: of a round of three layers 26 graphs were left for 9."""
    assert not [name for machine in PRESETS.values() for name in names(machine) if "command_buffer" in name]


def test_every_setting_has_a_reason_and_stands_once():
    for machine in PRESETS.values():
        chosen = settings(machine)
        assert len({setting.name for setting in chosen}) == len(chosen)
        assert all(len(setting.reason) > 20 for setting in chosen)


@pytest.mark.core
def test_the_installed_jaxlib_takes_every_flag():
    """All presets' flags at once; an unknown one, or a value that does not parse, ends the process."""
    flags = {str(setting) for machine in PRESETS.values() for setting in settings(machine) if setting.is_xla_flag}
    assert len(flags) >= 4
    for extra, accepted in (("", True), ("--xla_gpu_no_such_flag=1", False)):
        result = subprocess.run(
            [sys.executable, "-c", "import jax; print(jax.devices())"], capture_output=True, text=True,
            env=os.environ | {"XLA_FLAGS": " ".join([*sorted(flags), extra]), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert (result.returncode == 0) == accepted, result.stderr


@pytest.mark.slow
def test_the_cuda_plugin_compiles_with_them():
    """The plugin has its own copy of XLA; the target need not be there."""
    code = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import build_mesh, preset, topology_devices
machine = preset("nvl72")
mesh = build_mesh(machine, topology_devices(machine, "gb300"))
total = jax.shard_map(lambda x: jax.lax.psum(x @ x.T, "tp"), mesh=mesh, in_specs=P(None, "tp"), out_specs=P())
x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "tp")))
print(jax.jit(total).lower(x).compile().as_text())
"""
    flags = " ".join(str(setting) for setting in settings(preset("nvl72")) if setting.is_xla_flag)
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "all-reduce" in result.stdout, result.stderr


def test_exports_set_what_a_shell_reads():
    lines = exports(preset("nvl72"))
    script = "\n".join([*lines, 'printf "%s|%s" "$XLA_FLAGS" "$NCCL_MNNVL_ENABLE"'])
    environment = {"PATH": os.environ["PATH"], "XLA_FLAGS": "--mine=1"}
    output = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, env=environment)
    flags, mnnvl = output.stdout.split("|")
    assert shlex.split(flags) == [*(str(s) for s in settings(preset("nvl72")) if s.is_xla_flag), "--mine=1"]
    assert mnnvl == "1"


CLUSTERS = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", CLUSTERS, re.DOTALL)


def test_the_page_names_every_setting_and_no_other():
    stated = set(re.findall(r"^\| `((?:--xla|NCCL|XLA)[^`]*)`", CLUSTERS, re.MULTILINE))
    assert stated == {str(setting) for machine in PRESETS.values() for setting in settings(machine)}


def test_the_pages_scripts_parse_and_use_options_that_exist():
    shells = [text for language, text in BLOCKS if language == "bash"]
    assert len(shells) == 3
    for text in shells:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    commands = re.findall(r"scripts/decode\.py((?:[^\n]|\\\n)*)", CLUSTERS)
    assert len(commands) >= 6
    known = subprocess.run(
        [sys.executable, "scripts/decode.py", "--help"], capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"COLUMNS": "200"},
    ).stdout  # fmt: skip
    for option in set(re.findall(r"(?<!\S)--[a-z-]+", " ".join(commands))):
        assert re.search(rf"{option}\b", known), option


def test_the_pages_manifests_are_yaml():
    manifests = [text for language, text in BLOCKS if language == "yaml"]
    documents = [document for text in manifests for document in yaml.safe_load_all(text)]
    assert [document.get("kind") for document in documents] == ["Service", "Job", "ComputeDomain", None]
    job = documents[1]["spec"]
    assert job["completions"] == job["parallelism"] == 9
    assert job["template"]["spec"]["subdomain"] == documents[0]["metadata"]["name"]
