# SPDX-License-Identifier: Apache-2.0
"""Structured log lines about requests: one from every deployment that worked on one, all with the same answer id.

With `serve.log_encoding` JSON every field is one of the line's JSON object; in text they follow the message. Serve adds
deployment, replica and the `request_id` of the X-Request-ID header.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("ray.serve")


def milliseconds(stages: Mapping[str, float]) -> dict[str, float]:
    """Stage times in milliseconds, from seconds."""
    return {stage: round(seconds * 1e3, 3) for stage, seconds in stages.items()}


def log_request(event: str, answer_id: str, stages: Mapping[str, float], **fields: Any) -> None:
    """Log what became of a request in this deployment.

    Args:
        event: what is over: `answered`, `mended`, `generated`.
        answer_id: the `id` of the answer that the client gets.
        stages: seconds by stage.
        fields: whatever else; those that are None are left out.
    """
    told = {"answer_id": answer_id, **{name: value for name, value in fields.items() if value is not None}}
    told["stages_ms"] = milliseconds(stages)
    text = " ".join(f"{name}={value}" for name, value in told.items())
    logger.info("%s %s", event, text, extra={"event": event, **told})
