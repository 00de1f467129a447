# SPDX-License-Identifier: Apache-2.0
"""The committed OpenAPI file says what the service does."""

from __future__ import annotations

import json
from pathlib import Path

from serve_app.routes import openapi_text

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_the_committed_file_is_current() -> None:
    assert COMMITTED.read_text() == openapi_text(), "run `python -m serve_app.routes > docs/openapi.json`"


def test_every_reference_resolves() -> None:
    description = json.loads(openapi_text())

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [ref for value in node.values() for ref in references(value)]
        return [ref for item in node for ref in references(item)] if isinstance(node, list) else []

    found = {ref.removeprefix("#/components/schemas/") for ref in references(description)}
    assert (
        {"ChatRequest", "RagOptions", "ChatReply", "ErrorReply"} <= found <= set(description["components"]["schemas"])
    )


def test_requests_are_closed() -> None:
    schemas = json.loads(openapi_text())["components"]["schemas"]
    assert all(
        schemas[name]["additionalProperties"] is False for name in ("ChatRequest", "CompletionRequest", "RagOptions")
    )
