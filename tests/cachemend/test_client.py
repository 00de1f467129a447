# SPDX-License-Identifier: Apache-2.0
"""The streaming client against a scripted HTTP server: what it measures, what it says when things break."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cachemend.client import Answer, Client, ServiceDownError, ServiceError

Script = Callable[[BaseHTTPRequestHandler], None]
FIRST_TOKEN_S = 0.15


@pytest.fixture
def serve() -> Iterator[Callable[[Script], tuple[Client, list[Any]]]]:
    servers: list[ThreadingHTTPServer] = []

    def start(script: Script) -> tuple[Client, list[Any]]:
        bodies: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                script(self)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return Client(f"http://127.0.0.1:{server.server_address[1]}/"), bodies

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, *events: Any) -> None:
    for event in events:
        handler.wfile.write(b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n")
    handler.wfile.flush()


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], **more}


def begin(handler: BaseHTTPRequestHandler, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("content-type", "text/event-stream")
    handler.end_headers()


def good(handler: BaseHTTPRequestHandler) -> None:
    begin(handler)
    send(handler, delta(""))  # the role comes before any text and is not a first token
    time.sleep(FIRST_TOKEN_S)
    send(handler, delta("18"))
    time.sleep(FIRST_TOKEN_S)
    send(handler, delta("91", rag={"method": "stale", "citations": [{"chunk_id": "c1"}]}, stages_ms={"retrieve": 9.0}))
    usage = {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 980}}
    send(handler, {"choices": [], "usage": usage}, b"[DONE]")


def test_a_streamed_answer_is_collected_and_timed(serve: Any) -> None:
    client, bodies = serve(good)
    pieces: list[str] = []
    answer = client.ask("when?", method="stale", corpus="demo", top_k=5, max_tokens=8, on_text=pieces.append)
    assert (answer.text, pieces) == ("1891", ["18", "91"])
    assert (answer.prompt_tokens, answer.cached_tokens) == (1000, 980)
    assert answer.citations == [{"chunk_id": "c1"}]
    assert FIRST_TOKEN_S <= answer.ttft_s < answer.total_s - 0.9 * FIRST_TOKEN_S
    assert bodies[0]["rag"] == {"method": "stale", "corpus": "demo", "top_k": 5}
    assert bodies[0]["messages"] == [{"role": "user", "content": "when?"}]
    assert bodies[0]["max_tokens"] == 8


def test_what_was_not_chosen_is_not_sent(serve: Any) -> None:
    client, bodies = serve(good)
    client.ask("when?")
    assert bodies[0]["rag"] == {}
    assert "max_tokens" not in bodies[0]


def test_a_refusal_is_told_in_the_services_words(serve: Any) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        begin(handler, 404)
        handler.wfile.write(json.dumps({"error": {"message": "no corpus 'demo'; there is: handbook"}}).encode())

    with pytest.raises(ServiceError, match="there is: handbook"):
        serve(refuse)[0].ask("when?")


def test_a_refusal_that_is_not_json_has_its_status(serve: Any) -> None:
    def refuse(handler: BaseHTTPRequestHandler) -> None:
        begin(handler, 502)
        handler.wfile.write(b"<html>bad gateway</html>")

    with pytest.raises(ServiceError, match="502"):
        serve(refuse)[0].ask("when?")


def test_an_error_inside_the_stream_is_raised(serve: Any) -> None:
    def fail(handler: BaseHTTPRequestHandler) -> None:
        begin(handler)
        send(handler, delta("18"), {"error": {"message": "a replica died"}})

    with pytest.raises(ServiceError, match="a replica died"):
        serve(fail)[0].ask("when?")


def test_a_stream_that_stops_early_is_not_an_answer(serve: Any) -> None:
    def stop(handler: BaseHTTPRequestHandler) -> None:
        begin(handler)
        send(handler, delta("18"))

    with pytest.raises(ServiceError, match="broke off"):
        serve(stop)[0].ask("when?")


def test_nobody_there_is_told_apart() -> None:
    with pytest.raises(ServiceDownError, match="serve run serve_app:app"):
        Client("http://127.0.0.1:9").ask("when?")
    assert not Client("http://127.0.0.1:9").ready()


def test_time_is_shown_as_wholes_with_their_parts() -> None:
    stages = {"retrieve": 21.0, "embed": 14.2, "search": 0.4, "mend": 60.0, "fetch": 50.0, "ttft": 99.0, "total": 200.0}
    answer = Answer(stages_ms=stages)
    assert answer.where_time_went(least_ms=1) == "retrieve 21 ms (embed 14) · mend 60 ms (fetch 50)"
