# SPDX-License-Identifier: Apache-2.0
"""How the service starts and ends: refused on a foreign store, and no process left whichever way it is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from cachemend.service import SERVE, ServiceStartError, running_service
from kvcache.store import ChunkStore
from kvcache.target import TargetLLM
from tests.processes import assert_gone, family_of, title
from tests.tiny import tiny_model_dir, tiny_settings

pytestmark = pytest.mark.real
APPLICATION = "serve_app:app"


@pytest.fixture
def tiny_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Environment of a service with a tiny target; returns the target's directory."""
    directory = tiny_model_dir(tmp_path)
    for name, value in {
        "ROOT": str(tmp_path / "data"),
        "TARGET__MODEL": directory,
        "ENGINE__MAX_MODEL_LEN": "512",
        "ENGINE__KV_CACHE_BYTES": str(64 * 2**20),
    }.items():
        monkeypatch.setenv(f"CACHEMEND_{name}", value)
    return directory


def test_a_store_of_another_target_is_refused(tiny_service: str, tmp_path: Path) -> None:
    other = TargetLLM.load(settings=tiny_settings(tiny_model_dir(tmp_path, seed=1)))
    mine = TargetLLM.load(settings=tiny_settings(tiny_service))
    settings = tiny_settings(tiny_service, root=str(tmp_path / "data"))
    store = ChunkStore(
        settings.store_uri,
        fingerprint=other.fingerprint,
        geometry=other.geometry,
        dtype=torch.float32,
        settings=settings.store,
    )
    store.put(other.stale_kv([[1, 2, 3]])[0])
    with pytest.raises(ServiceStartError) as refused, ExitStack() as stack:
        stack.enter_context(running_service(APPLICATION, lambda _: None))
    log = Path(str(refused.value).split("The last lines of ")[1].split(":\n")[0]).read_text()
    assert mine.fingerprint[:12] in log and other.fingerprint[:12] in log


@pytest.fixture
def service(tiny_service: str, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """`serve run` on a cluster of its own; its output is in `log`."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [SERVE, "run", "--address", "local", APPLICATION],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for survivor in family_of(process.pid):
                survivor.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_nothing_is_left(service: subprocess.Popen, how: signal.Signals) -> None:
    family = _wait_for_engine(service, 300)
    service.send_signal(how)
    service.wait(timeout=60)
    assert_gone(family, 30)


def test_serve_shutdown_ends_every_replica(service: subprocess.Popen, tmp_path: Path) -> None:
    family = _wait_for_engine(service, 300)
    replicas = [p for p in family if re.search(r"VLLM::|ServeReplica", title(p))]
    assert len(replicas) >= 5  # ingress, retriever, repairer, engine, and vLLM's own
    (dashboard,) = set(re.findall(r"http://127\.0\.0\.1:\d+(?= *\x1b|\s)", (tmp_path / "log").read_text()))
    # Ray guards a cluster that it starts itself with a token, which its own commands must be told to use.
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    subprocess.run([SERVE, "shutdown", "--yes", "--address", dashboard], check=True, timeout=120, env=environment)
    assert_gone(replicas, 30)
    assert service.poll() is None  # `serve run` stays, with its cluster, until it is ended


def _wait_for_engine(process: subprocess.Popen, timeout_s: float) -> list[psutil.Process]:
    """The whole family, once vLLM's engine has joined it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "the service ended by itself"
        if any("VLLM::EngineCore" in title(member) for member in family_of(process.pid)):
            time.sleep(5)
            return family_of(process.pid)
        time.sleep(1)
    raise AssertionError("vLLM did not start in time")
