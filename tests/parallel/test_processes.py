"""Several processes: who they are, what is refused, and two real ones that decode, load, write and end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from kimi_jax.checkpoint.plan import SKIPPED_FAMILIES, plan, split_processes
from kimi_jax.checkpoint.safetensors import open_checkpoint as open_tensors
from kimi_jax.decoding.engine import PLAIN
from kimi_jax.decoding.loading import open_checkpoint
from kimi_jax.parallel import processes
from kimi_jax.parallel.eplb import load_placements
from kimi_jax.parallel.processes import Launch, ProcessOptions, launched
from meshes.devices import build_mesh
from meshes.presets import preset
from tests.parallel import one_of_two

ROOT = Path(__file__).parents[2]
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[01-09]", "SLURM_NTASKS": "9", "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "9", "SLURM_STEP_TASKS_PER_NODE": "1(x9)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "11", "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}  # fmt: skip
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (SLURM, Launch("SLURM", 9, 4, hosts=9, local_processes=1, local_id=0)),
        (SLURM | {"SLURM_NTASKS": "72", "SLURM_LOCALID": "5", "SLURM_STEP_TASKS_PER_NODE": "8(x9)"},
         Launch("SLURM", 72, 4, hosts=9, local_processes=8, local_id=5)),
        # A batch script's own shell and an allocation's login shell have a job and no step.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "9", "SLURM_PROCID": "0"}, None),
        (OPEN_MPI, Launch("Open MPI", 16, 11, hosts=2, local_processes=8, local_id=3)),
        (KUBERNETES, Launch("Kubernetes", None, 2)),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
)  # fmt: skip
def test_launchers_are_found_by_their_environment(environment, expected):
    assert launched(environment) == expected


@pytest.mark.parametrize(
    ("launch", "visible", "expected"),
    [
        (None, 0, None),
        (None, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Launch("SLURM", 9, 4, 9, 1, 0), 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Launch("SLURM", 72, 4, 9, 8, 5), 8, [5]),
        (Launch("SLURM", 36, 4, 9, 2, 1), 4, [2, 3]),
        # --gpus-per-task=1 shows each task its own GPU only.
        (Launch("SLURM", 72, 4, 9, 8, 5), 1, [0]),
    ],
)
def test_a_hosts_gpus_are_shared_by_its_processes(launch, visible, expected):
    """jax would give one GPU to a single SLURM task on a node of eight."""
    assert processes._local_gpus(launch, visible) == expected


@pytest.mark.parametrize(
    ("environment", "options", "mesh", "simulated", "words"),
    [
        ({}, {"processes": 2}, "nvl72", True, "--coordinator, --process-id"),
        ({}, {"coordinator": "node01:9000"}, "nvl72", True, "--processes, --process-id"),
        ({}, {"coordinator": "node01", "processes": 2, "process_id": 0}, "nvl72", True, "HOST:PORT"),
        ({}, {"coordinator": "node01:9000", "processes": 2, "process_id": 2}, "nvl72", True, "numbered 0 to 1"),
        ({}, {"coordinator": "node01:9000", "processes": 0, "process_id": 0}, "nvl72", True, "--processes is 0"),
        ({}, {"coordinator": "localhost:9000", "processes": 2, "process_id": 0}, "hgx-ib-16", False, "2 hosts"),
        ({}, {"coordinator": "127.0.0.1:9000", "processes": 18, "process_id": 3}, "nvl72", False, "18 hosts"),
        (SLURM, {"coordinator": "[::1]:9000"}, "hgx-ib-72", True, "9 hosts"),
        (SLURM, {"processes": 8}, "hgx-ib-72", True, "SLURM started this as 9"),
        (OPEN_MPI, {"process_id": 1}, "hgx-ib-16", True, "Open MPI started this as 11"),
        (KUBERNETES, {}, "hgx-ib-16", True, "--processes in a Kubernetes Job"),
    ],
)
def test_refused_before_anything_waits(monkeypatch, environment, options, mesh, simulated, words):
    monkeypatch.setattr(os, "environ", environment)
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        processes.join(ProcessOptions(**options), preset(mesh), simulated)


@pytest.mark.parametrize(
    ("environment", "options"),
    [({}, {}), (SLURM, {"processes": 1}), (SLURM | {"SLURM_NTASKS": "1"}, {}), (KUBERNETES, {"processes": 1})],
)
def test_alone(monkeypatch, environment, options):
    monkeypatch.setattr(os, "environ", environment)
    process = processes.join(ProcessOptions(**options), preset("local"), simulated=True)
    assert (process.index, process.count, process.prints) == (0, 1, True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(*arguments) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_NUM", "XLA_"))}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("index", "status", "words"),
    [
        (1, 1, r"nothing listens at localhost:\d+ after 1 s"),
        (0, processes.Watchdog.STATUS, r"not all of 2 processes appeared at localhost:\d+ within 1 s"),
    ],
)
def test_a_process_whose_peers_never_come_says_so(index, status, words):
    code = (
        "import sys; from kimi_jax.parallel.processes import *; from meshes.presets import preset\n"
        "try: join(ProcessOptions(sys.argv[1], 2, int(sys.argv[2]), init_timeout=1), preset('local'), True)\n"
        "except ValueError as error: sys.exit(str(error))"
    )
    child = start("-c", code, f"localhost:{free_port()}", index)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == status
    assert re.search(words, errors), errors


def test_the_watchdog_ends_a_process_that_stands_still():
    code = (
        "import time; from kimi_jax.parallel.processes import Watchdog\n"
        "with Watchdog(0.5, 'ended in time'): pass\n"
        "with Watchdog(2, 'nothing moved') as dog:\n"
        "    for _ in range(6): time.sleep(0.5); dog.beat()\n"
        "    print('alive', flush=True); time.sleep(1000)"
    )
    child = start("-c", code)
    output, errors = child.communicate(timeout=300)
    assert child.returncode == processes.Watchdog.STATUS
    assert output == "alive\n"
    assert errors.startswith("error: nothing moved\n")
    assert "line 5" in errors, "the traces say where it stood"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two processes of four devices that have run one_of_two.py: their results, outputs and exit statuses."""
    folder, port = tmp_path_factory.mktemp("two"), free_port()
    children = [start(one_of_two.__file__, index, port, folder) for index in range(2)]
    outputs = [child.communicate(timeout=900) for child in children]
    results = []
    for index in range(2):
        assert (folder / f"{index}.json").exists(), outputs
        results.append(json.loads((folder / f"{index}.json").read_text()))
    return folder, results, outputs, [child.returncode for child in children]


@pytest.fixture(scope="module")
def machine():
    return preset(one_of_two.MESH).with_axes(**one_of_two.AXES)


@pytest.fixture(scope="module")
def alone(machine):
    """The checkpoint on eight devices of this one process."""
    mesh = build_mesh(machine, jax.devices())
    return open_checkpoint(one_of_two.CHECKPOINT, mesh, machine.layout, "bfloat16")


@pytest.mark.slow
def test_two_processes_decode_the_text_of_one(two, engines):
    """With speculation over two processes, without on one device."""
    _, results, _, _ = two
    expected = one_of_two.texts(engines("local"), PLAIN)
    assert results[0]["texts"] == results[1]["texts"] == expected
    assert results[0]["served"] == expected, "process 1 has followed the plans of process 0"


@pytest.mark.slow
def test_two_processes_see_what_one_sees(two, engines):
    """Each runs the tower for the pictures of its own groups, its own or those that plans carry."""
    _, results, _, _ = two
    expected = one_of_two.seen(engines("local"), PLAIN)
    assert expected[0] != expected[1]
    assert results[0]["seen"] == results[1]["seen"] == results[0]["seen_by_followers"] == expected


@pytest.mark.slow
def test_messages_of_process_0_reach_the_others(two):
    _, results, _, _ = two
    assert [result["messages"] for result in results] == [[], ["a plan", "", "another"]]


@pytest.mark.slow
def test_one_process_prints(two):
    _, _, outputs, _ = two
    assert outputs[0][0] == "process 0 speaks\n", "gloo's reports stay away from standard output"
    assert outputs[1][0] == ""
    assert "simulated on 8 CPU devices of 2 processes" in outputs[0][1]
    assert "simulated" not in outputs[1][1]


@pytest.mark.slow
def test_differing_commands_and_idle_processes_are_refused(two):
    _, results, _, _ = two
    for result in results:
        assert result["disagreements"][0].startswith("process 1 has other prompts than process 0")
    assert results[0]["disagreements"][1] == ""
    assert "start only 1 processes" in results[1]["disagreements"][1]


@pytest.mark.slow
def test_each_process_reads_its_own_bytes_only(two, alone):
    _, results, _, _ = two
    planned = plan(
        open_tensors(one_of_two.CHECKPOINT), alone.model, alone.config.key_prefix, alone.mesh, alone.rules,
        dtype="bfloat16", num_experts=alone.config.n_routed_experts, slot_experts=alone.model.slot_experts,
        process_of=split_processes(alone.mesh, 2),
    )  # fmt: skip
    sizes = {name: tensor.nbytes for name, tensor in open_tensors(one_of_two.CHECKPOINT).items()}
    for index, result in enumerate(results):
        read = Counter()
        for name, start_, end in result["ranges"]:
            read[name] += end - start_
        of_tower = {name: read.pop(name) for name in sizes if name.startswith(SKIPPED_FAMILIES)}
        assert of_tower == {name: sizes[name] for name in of_tower}, "tower and projector are whole on every device"
        assert sum(read.values()) == planned.read_bytes(index)
        assert all(read[name] <= sizes[name] for name in read), "a byte was read twice"
        routed = {name for name in read if ".mlp.experts." in name and name.endswith("_packed")}
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in routed}
        assert experts == set(range(8 * index, 8 * index + 8)), "ep 2: each process has half of 16 experts"


@pytest.mark.slow
def test_processes_hold_what_one_holds(two, alone):
    _, results, _, _ = two
    expected = one_of_two.shards(alone)
    assert results[0]["shards"] | results[1]["shards"] == expected
    assert not results[0]["shards"].keys() & results[1]["shards"].keys()


@pytest.mark.slow
def test_sharded_checkpoints_are_written_and_read_by_both(two, alone, machine):
    folder, results, _, _ = two
    for result in results:
        assert result["restored"] == result["shards"]
    chunks = [{(name, tuple(chunk)) for name, chunk in result["chunks"]} for result in results]
    assert all(len(result["chunks"]) == len(read) for result, read in zip(results, chunks, strict=True)), "read twice"
    stacks = [{chunk for chunk in read if chunk[0].endswith("packed")} for read in chunks]
    assert stacks[0]
    assert not stacks[0] & stacks[1], "experts of one process are not read by the other"
    again = open_checkpoint(folder / "sharded", alone.mesh, machine.layout, "bfloat16")
    assert one_of_two.shards(again) == one_of_two.shards(alone)
    assert len(list((folder / "sharded").glob("checksums-*.json"))) == 2


@pytest.mark.slow
def test_the_hf_layout_is_written_by_both(two):
    folder, _, _, _ = two

    def tensors(directory):
        files = sorted(directory.glob("*.safetensors"))
        return {key: value for file in files for key, value in safetensors.numpy.load_file(file).items()}

    written, original = tensors(folder / "written"), tensors(one_of_two.CHECKPOINT)
    assert written.keys() <= original.keys()
    assert {key for key in original.keys() - written.keys() if "vision" not in key and "mm_proj" not in key} == set()
    for key, value in written.items():
        assert value.tobytes() == original[key].tobytes(), key


@pytest.mark.slow
def test_a_killed_process_ends_the_other(two):
    _, _, outputs, statuses = two
    assert statuses[1] == -9
    assert statuses[0] not in (0, None)
    told = outputs[0][1]
    assert "another process has ended" in told or "another task died" in told, told


RANDOM = ("--checkpoint", one_of_two.CHECKPOINT, "--drafter", one_of_two.DRAFTER, "--ep", 2, "--tp", 4)


def start_two(script, *arguments):
    port = free_port()
    return [
        start(
            f"scripts/{script}", *arguments, "--coordinator", f"localhost:{port}", "--processes", 2, "--process-id", i
        )
        for i in range(2)
    ]


@pytest.mark.slow
def test_decode_with_moving_experts_as_two_processes(tmp_path):
    """Experts move from one process to the other, to where they move in one process, and the text stays the same."""

    def command(placement):
        options = ("--max-new-tokens", 24, "--json", "--rebalance-every", 4, "--save-placement", placement)
        return (*RANDOM, "--raw", *options, "Hello", "12", "ab")

    files = [tmp_path / "alone.json", tmp_path / "two.json"]
    still = start("scripts/decode.py", *RANDOM, "--raw", "--max-new-tokens", 24, "--json", "Hello", "12", "ab")
    runs = [still.communicate()[0], start("scripts/decode.py", *command(files[0])).communicate()[0]]
    children = start_two("decode.py", *command(files[1]))
    (output, errors), (silent, _) = (child.communicate() for child in children)
    assert [child.returncode for child in children] == [0, 0], errors
    assert silent == ""
    runs.append(output)
    texts = [[result["token_ids"] for result in json.loads(run)["results"]] for run in runs]
    assert texts[0] == texts[1] == texts[2]
    summaries = [json.loads(run)["summary"] for run in runs]
    assert "of 2 processes" in summaries[2]["ran"]
    moves = [[(move["round"], move["slots"]) for move in summary["rebalancing"]] for summary in summaries[1:]]
    assert moves[0] == moves[1]
    assert sum(slots for _, slots in moves[0]) > 0
    placements = [load_placements(file, layers=3, num_experts=16, ranks=8) for file in files]
    assert placements[0] == placements[1]
    parts = [np.array(placement.slot_experts).reshape(2, -1) for placement in placements[0]]
    assert any(set(part[0]) != set(range(8)) for part in parts), "an expert came from the other process"


@pytest.mark.slow
def test_evaluate_as_two_processes(tmp_path):
    ids, files = tmp_path / "ids.json", [tmp_path / "alone.npz", tmp_path / "two.npz"]
    ids.write_text(json.dumps([[1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7, 6]]))
    command = ("logits", "--checkpoint", one_of_two.CHECKPOINT, "--ep", 2, "--tp", 4, "--input-ids", ids, "--output")
    children = [start("scripts/evaluate.py", *command, files[0]), *start_two("evaluate.py", *command, files[1])]
    for child in children:
        _, errors = child.communicate()
        assert child.returncode == 0, errors
    alone, two = (np.load(file)["logits"] for file in files)
    assert alone.shape[:2] == (3, 4)
    np.testing.assert_allclose(two, alone, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "words"), [("--heartbeat-timeout", "another task died"), ("--watchdog", "nothing was loaded or decoded")]
)
def test_a_process_that_hangs_ends_the_other(option, words):
    """Stopped and not killed: its connections stay open."""
    limits = {"--heartbeat-timeout": 1000, "--watchdog": 1000} | {option: 240}
    flags = [part for pair in limits.items() for part in pair]
    reading, stopping = start_two("decode.py", *RANDOM, "--raw", "--max-new-tokens", 4000, *flags, "Hello")
    assert reading.stdout.read(1)
    stopping.send_signal(signal.SIGSTOP)
    try:
        _, errors = reading.communicate(timeout=600)
    finally:
        stopping.kill()
    assert reading.returncode != 0
    assert words in errors
