# SPDX-License-Identifier: Apache-2.0
"""An S3-speaking server on loopback (moto) that fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Response

Application = Callable[[dict[str, Any], Callable], Iterable[bytes]]

SLOW_DOWN = (503, {}, "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>")
FORBIDDEN = (403, {}, "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
ELSEWHERE = (
    301,
    {"x-amz-bucket-region": "eu-north-1"},
    "<Error><Code>PermanentRedirect</Code><Message>The bucket is elsewhere.</Message></Error>",
)


@dataclass
class S3Server:
    """A running server.

    Attributes:
        port: on loopback.
        faults: answers to give instead of the real ones, first one first; a request that `matches` takes one.
        matches: which requests (method, path) fail while there are faults.
        seen: method and path of every request.
    """

    port: int = 0
    faults: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    matches: Callable[[str, str], bool] = lambda method, path: True
    seen: list[tuple[str, str]] = field(default_factory=list)
    client: Any = None

    def uri(self, path: str) -> str:
        """`s3://` URI of a bucket and prefix on this server, credentials included."""
        return f"s3://key:verysecret@{path}?endpoint_override=127.0.0.1:{self.port}&scheme=http"

    def objects(self, bucket: str) -> list[str]:
        """Keys in a bucket, asked from the server by another client."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def _wrap(self, application: Application) -> Application:
        lock = threading.Lock()

        def wrapped(environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
            method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            with lock:
                self.seen.append((method, path))
                fault = self.faults.pop(0) if self.faults and self.matches(method, path) else None
            if fault is None:
                return application(environ, start_response)
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            status, headers, body = fault
            return Response(body if method != "HEAD" else b"", status, headers)(environ, start_response)

        return wrapped


class _Quiet(WSGIRequestHandler):
    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextmanager
def s3_server(bucket: str) -> Iterator[S3Server]:
    """Run a server with one empty bucket."""
    s3_backends.reset()  # moto keeps its state in the process
    server = S3Server()
    application = server._wrap(DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    server.port = http.server_port
    thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        server.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{server.port}",
            aws_access_key_id="key",
            aws_secret_access_key="verysecret",
            region_name="us-east-1",
        )
        server.client.create_bucket(Bucket=bucket)
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
