"""Starts torchrun for a group of scenarios, with a time limit for the whole tree of processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pair_cases import GROUPS

WORKER = Path(__file__).with_name("worker.py")
MARK = "PAIR "
ENDS_AT = "PAIR_ENDS_AT"
"""When the group is killed, on the monotonic clock, which all processes share."""
TAIL_LINES = 80


@dataclass(frozen=True)
class Report:
    """What a group said."""

    lines: dict[str, list[dict[str, Any]]]
    output: str
    seconds: float
    expired: bool

    def tail(self) -> str:
        """The end of the output."""
        head = "expired and was killed" if self.expired else f"took {self.seconds:.0f} s"
        return "\n".join([f"the group {head}; output:", *self.output.splitlines()[-TAIL_LINES:]])

    def problem(self, group: str, scenario: str) -> str:
        """Why the scenario did not succeed; empty if it did."""
        lines = self.lines.get(scenario, [])
        bad = [f"rank {line['rank']}: {line['error']}" for line in lines if not line["ok"]]
        wanted = GROUPS[group].reports
        if len(lines) < wanted:
            bad.append(f"{len(lines)} of {wanted} ranks reported\n{self.tail()}")
        return "\n".join(bad)


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, from /proc."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(folder.name))
    found, queue = [], [pid]
    while queue:
        below = children[queue.pop()]
        found += below
        queue += below
    return found


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """torchrun gives its workers sessions of their own: kill them one by one."""
    for pid in [*descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(timeout=30)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, which ``timeout`` sends, raises SystemExit, so that the processes below are killed:
    they would go on using the GPUs."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_group(name: str) -> Report:
    """Run a group to its end or its limit; never raises for what the workers do."""
    group = GROUPS[name]
    command = [
        sys.executable,
        *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(group.ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        str(WORKER),
        name,
    ]
    environment = {
        **os.environ,
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONUNBUFFERED": "1",
        **group.environment,
    }
    start = time.monotonic()
    environment[ENDS_AT] = str(start + group.limit_s)
    expired = False
    with ended_by_sigterm(), tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout=group.limit_s)
        except subprocess.TimeoutExpired:
            expired = True
        finally:
            if process.poll() is None:
                kill_tree(process)
        log.seek(0)
        output = log.read().decode(errors="replace")
    lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in output.splitlines():
        # Two ranks write into one file: a line may start in the middle of another.
        _, mark, text = line.partition(MARK)
        if mark:
            try:
                record = json.loads(text)
            except ValueError:
                continue
            lines[record["scenario"]].append(record)
    return Report(dict(lines), output, time.monotonic() - start, expired)


@cache
def report_of(name: str) -> Report:
    """A group's report; the group runs once in a session."""
    report = run_group(name)
    print(f"group {name}: {report.seconds:.1f} s")
    for scenario, lines in report.lines.items():
        for line in lines:
            print(f"  {scenario} rank {line['rank']}: {line['seconds']:.1f} s {line['details']}")
    return report
