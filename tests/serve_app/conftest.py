# SPDX-License-Identifier: Apache-2.0
"""One real Ray Serve for the whole folder: the real ingress in front of mocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve

from kvcache.settings import Settings, load_settings
from serve_app.app import APP_NAME, Parts, run
from serve_app.mocks import MockEngine, MockRepairer, MockRetriever
from serve_app.tuning import tune
from tests.tiny import tiny_model_dir

MODEL = "tiny-llama-0"
MAX_MODEL_LEN = 400
ONGOING, QUEUED = 12, 4


@dataclass(frozen=True)
class Service:
    """A running service."""

    url: str
    settings: Settings

    def ask(self, question: str = "Who?", **fields: object) -> httpx.Response:
        """One chat request."""
        body = {"messages": [{"role": "user", "content": question}], **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=30)

    def counts(self, part: str) -> dict[str, int]:
        """Requests by outcome of a mock."""
        return serve.get_deployment_handle(part, APP_NAME).counts.remote().result()

    def live_handoffs(self) -> int:
        """Hand-offs that nobody has ended yet."""
        return serve.get_deployment_handle("Repairer", APP_NAME).live_handoffs.remote().result()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    models: Path = tmp_path_factory.mktemp("models")
    assert Path(tiny_model_dir(models)).name == MODEL
    settings = load_settings(
        root=str(tmp_path_factory.mktemp("data")),
        models_dir=str(models),
        target={"model": MODEL},
        engine={"max_model_len": MAX_MODEL_LEN},
        handoff={"arena_bytes": 2**22, "lease_s": 600.0},
        serve={
            "port": _free_port(),
            "max_ongoing_requests": ONGOING,
            "max_queued_requests": QUEUED,
            "first_token_timeout_s": 8.0,
            "shutdown_timeout_s": 2.0,
        },
    )
    os.environ.pop("RAY_ADDRESS", None)
    tune()
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    try:
        run(settings, parts=Parts(MockRetriever, MockRepairer, MockEngine))
        yield Service(f"http://127.0.0.1:{settings.serve.port}", settings)
    finally:
        serve.shutdown()
        ray.shutdown()
