# SPDX-License-Identifier: Apache-2.0
"""The service as a child process: `serve run` on a free port, in a Ray cluster of its own, gone without a trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

from cachemend.client import Client

READY_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 45.0
POLL_S = 1.0
FAILED = ("Deploying app", "DEPLOY_FAILED")


class ServiceStartError(RuntimeError):
    """The service did not become ready; the message has its last log lines and says where the log is."""


@contextmanager
def running_service(import_path: str, on_wait: Callable[[float], None]) -> Iterator[Client]:
    """Run the Serve application for the length of a `with` block.

    Args:
        import_path: `module:application`.
        on_wait: called about once a second with the seconds waited for the service so far.

    Raises:
        ServiceStartError: it ended, or was not ready in `READY_TIMEOUT_S`.
    """
    folder = Path(tempfile.mkdtemp(prefix="cachemend-service-"))
    port = _free_port()
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"name": "cachemend", "route_prefix": "/", "import_path": import_path}],
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    log = folder / "service.log"
    command = [str(Path(sys.executable).with_name("serve")), "run", "--address", "local", str(folder / "serve.yaml")]
    # A session of its own keeps the terminal's Ctrl-C away from it: it ends in order, when this block does.
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        )
    try:
        client = Client(f"http://127.0.0.1:{port}")
        _wait_until_ready(client, process, log, on_wait)
        yield client
    finally:
        stop_tree(process, STOP_TIMEOUT_S)


def stop_tree(process: subprocess.Popen[bytes], timeout_s: float) -> list[str]:
    """End a process by SIGINT and make sure that none of its descendants outlives it.

    Returns:
        Names of the descendants that had to be ended by force.
    """
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + timeout_s
    # Descendants whose parent is gone are still found here: the list was taken while the tree was whole.
    _, alive = psutil.wait_procs(family, timeout=timeout_s)
    forced = []
    for ender in (psutil.Process.terminate, psutil.Process.kill):
        for survivor in alive:
            try:
                forced.append(survivor.name())
                ender(survivor)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(alive, timeout=5.0)
    process.wait(timeout=max(5.0, deadline - time.monotonic()))
    return forced


def _wait_until_ready(
    client: Client, process: subprocess.Popen[bytes], log: Path, on_wait: Callable[[float], None]
) -> None:
    started = time.monotonic()
    while not client.ready():
        waited = time.monotonic() - started
        lines = log.read_text(errors="replace").splitlines()
        if (
            process.poll() is not None
            or waited > READY_TIMEOUT_S
            or any(all(f in line for f in FAILED) for line in lines)
        ):
            what = "ended at once" if process.poll() is not None else f"was not ready after {waited:.0f} s"
            tail = "\n".join(f"  {line}" for line in lines[-12:])
            raise ServiceStartError(f"the service {what}. The last lines of {log}:\n{tail}")
        on_wait(waited)
        time.sleep(POLL_S)


def _environment() -> dict[str, str]:
    environment = dict(os.environ, RAY_USAGE_STATS_ENABLED="0", PYTHONUNBUFFERED="1")
    environment.pop("RAY_ADDRESS", None)
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
