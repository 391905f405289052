"""Several processes as one program: joined through `jax.distributed`, one of them printing, all of them ending.

A launcher (SLURM, Open MPI, an indexed Kubernetes Job) says who this process is, or the user does. jax finds the
coordinator under these launchers and watches over the others with heartbeats. What is added here: refusals that name
the fix instead of a hang, one process that prints, an end at once when one process fails, and a watchdog for the case
that all live and nothing moves.
"""

import dataclasses
import faulthandler
import ipaddress
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Self

import tyro

from kimi_jax import standard_output
from meshes.devices import visible_gpu_count
from meshes.presets import Preset

GRACE_SECONDS = 30
"""jax's own time-outs are this much longer than ours, whose messages say what to do."""


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Several processes, one a node or one a GPU. SLURM needs none of these; docs/clusters.md says what others need."""

    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """Where process 0 listens for the others."""
    processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of processes; 1 ignores the launcher."""
    process_id: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """This process, from 0."""
    init_timeout: int = 300
    """Seconds to wait for all processes to appear."""
    heartbeat_timeout: int = 100
    """Seconds of silence after which a process counts as dead and all others end."""
    watchdog: Annotated[int | None, tyro.conf.arg(metavar="SECONDS")] = None
    """End when nothing was loaded or decoded for so long, compilation included; by default never."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher's environment says of this process."""

    launcher: str
    processes: int | None
    """None where only jax can find out."""
    process_id: int
    hosts: int | None = None
    local_processes: int = 1
    """Processes on this host."""
    local_id: int = 0


def launched(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that started this process, None for a plain start. A single task of a job counts as launched."""
    if {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_NTASKS"} <= environment.keys():
        # "8(x9)" or "8,7": tasks of each host, alike but for the last.
        per_host = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        return Launch(
            "SLURM",
            int(environment["SLURM_NTASKS"]),
            int(environment["SLURM_PROCID"]),
            int(environment.get("SLURM_STEP_NUM_NODES", "1")),
            int(per_host[0]) if per_host else 1,
            int(environment.get("SLURM_LOCALID", "0")),
        )
    if {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"} <= environment.keys():
        processes = int(environment["OMPI_COMM_WORLD_SIZE"])
        local = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
        return Launch(
            "Open MPI",
            processes,
            int(environment["OMPI_COMM_WORLD_RANK"]),
            math.ceil(processes / local),
            local,
            int(environment.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")),
        )
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return Launch("Kubernetes", None, int(environment["JOB_COMPLETION_INDEX"]))
    return None


@dataclasses.dataclass(frozen=True)
class Process:
    """This process among those of the program."""

    index: int = 0
    count: int = 1

    @property
    def prints(self) -> bool:
        """Whether it is the one that talks to the user and writes results."""
        return self.index == 0

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


_this = Process()


def this() -> Process:
    """What `join` found, without touching a device: before it, and without it, a process is alone."""
    return _this


def join(options: ProcessOptions, machine: Preset, simulated: bool) -> Process:
    """Joins the other processes of this program, if there are any.

    Comes before jax touches a device. Afterwards only process 0 prints to standard output.

    Raises:
      ValueError: options that are incomplete or contradict each other or the launcher, a coordinator that other hosts
        cannot reach, no coordinator found.
    """
    global _this
    if _this.count > 1:  # a command that opens a second checkpoint
        return _this
    launch = launched(os.environ)
    given = {name: getattr(options, name) for name in ("coordinator", "processes", "process_id")}
    alone = launch is None or launch.processes == 1
    if options.processes == 1 or (alone and not any(value is not None for value in given.values())):
        return _this
    if launch is not None:
        for name in ("processes", "process_id"):
            stated = getattr(launch, name)
            if given[name] is not None and stated is not None and given[name] != stated:
                raise ValueError(f"{_flag(name)} is {given[name]}, but {launch.launcher} started this as {stated}")
            given[name] = stated if given[name] is None else given[name]
    missing = [_flag(name) for name, value in given.items() if value is None and (name != "coordinator" or not launch)]
    if missing:
        where = "in a Kubernetes Job (1 for one that is alone)" if launch else "outside SLURM, Open MPI and Kubernetes"
        raise ValueError(f"give {', '.join(missing)} {where}: every process needs to know who takes part")
    coordinator, count, index = given["coordinator"], given["processes"], given["process_id"]
    _check(coordinator, count, index, _hosts(launch, machine, simulated))
    _initialize(options, launch, coordinator, count, index)
    _this = Process(index, count)
    _own_standard_output(_this.prints, simulated)
    return _this


def coordinator_host() -> str:
    """Host of process 0 as the others reach it, after `join` has found several."""
    # Under a launcher jax finds the coordinator by itself, and says it nowhere else.
    from jax._src import distributed

    address = distributed.global_state.coordinator_address
    assert address is not None, "there is one process only"
    return address.rpartition(":")[0].strip("[]")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _hosts(launch: Launch | None, machine: Preset, simulated: bool) -> int:
    """Hosts that the program runs on, as far as can be known before they have met."""
    if launch is not None and launch.hosts is not None:
        return launch.hosts
    return 1 if simulated else math.ceil(machine.layout.num_devices / machine.topology.gpus_per_node)


def _check(coordinator: str | None, count: int, index: int, hosts: int) -> None:
    if count < 1:
        raise ValueError(f"--processes is {count}; there is at least one")
    if not 0 <= index < count:
        raise ValueError(f"--process-id is {index}; {count} processes are numbered 0 to {count - 1}")
    if coordinator is None:
        return
    host, colon, port = coordinator.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"--coordinator is {coordinator!r}; it is HOST:PORT, with any free port of process 0's host")
    if hosts > 1 and _is_loopback(host):
        raise ValueError(
            f"--coordinator {coordinator} is this host to every host, and there are {hosts} hosts: the processes of "
            "the others would never find it. Name process 0's host or its address on the network"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _initialize(
    options: ProcessOptions, launch: Launch | None, coordinator: str | None, count: int, index: int
) -> None:
    import jax

    seconds = options.init_timeout
    if coordinator is not None and index > 0:
        _wait_for(coordinator, seconds)
    advice = (
        f"not all of {count} processes appeared at {coordinator or 'the coordinator'} within {seconds} s: were all "
        "started with the same coordinator and number of processes, and is the port open between their hosts? "
        "--init-timeout waits longer"
    )
    # jax would end the process from C++, without saying what to do.
    with Watchdog(seconds, advice, traces=False):
        try:
            jax.distributed.initialize(
                coordinator,
                count,
                index,
                local_device_ids=_local_gpus(launch, visible_gpu_count()),
                cluster_detection_method=None if coordinator is None else "deactivate",
                initialization_timeout=seconds + GRACE_SECONDS,
                heartbeat_timeout_seconds=options.heartbeat_timeout,
                shutdown_timeout_seconds=GRACE_SECONDS,
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"jax could not join the processes ({error}): give --coordinator HOST:PORT, a port that is free there"
            ) from error


def _wait_for(coordinator: str, seconds: float) -> None:
    """Until something listens there.

    Raises:
      ValueError: after so many seconds.
    """
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"nothing listens at {coordinator} after {seconds:g} s ({error}): is process 0 running there, and "
                    "is the port open? --init-timeout waits longer"
                ) from None
        time.sleep(0.2)


def _local_gpus(launch: Launch | None, visible: int) -> list[int] | None:
    """This process's share of the GPUs it sees: all of them unless its host runs several processes that see the same.

    jax would take one GPU a process under SLURM and Open MPI, even where the node has one process.
    """
    if not visible:
        return None
    share = visible // launch.local_processes if launch else 0
    if launch is None or not share:
        return list(range(visible))
    return list(range(launch.local_id * share, (launch.local_id + 1) * share))


def _own_standard_output(prints: bool, simulated: bool) -> None:
    """Leaves standard output to Python, and Python's to one process.

    gloo, which carries CPU collectives, reports connections on standard output, and NCCL_DEBUG does too.
    """
    sys.stdout.flush()
    mine = os.dup(1) if prints else os.open(os.devnull, os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if simulated else 2, 1)
    sys.stdout = standard_output.text_stream(mine, line_buffering=True)


def end(status: int) -> None:
    """Ends this process with a status after an error: at once where there are several, so that the others notice.

    The usual end would wait for processes that wait for this one.
    """
    if _this.count > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class Watchdog:
    """Ends the process with a message when `beat` was not called for some seconds after `start`.

    As a context it starts, and stops when left.
    """

    STATUS = 75
    """Exit status, BSD's EX_TEMPFAIL: trying again may help."""

    def __init__(self, seconds: float, message: str, traces: bool = True):
        self._seconds, self._message, self._traces = seconds, message, traces
        self._stopped, self._deadline = threading.Event(), 0.0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Self:
        """From now on."""
        self.beat()
        self._thread.start()
        return self

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def beat(self) -> None:
        """Says that something moves."""
        self._deadline = time.monotonic() + self._seconds

    def _watch(self) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            if self._stopped.wait(left):
                return
        print(f"error: {self._message}", file=sys.stderr, flush=True)
        if self._traces:
            faulthandler.dump_traceback(all_threads=True)
        os._exit(self.STATUS)
