# SPDX-License-Identifier: Apache-2.0
"""`cachemend demo`: the whole chain on the example corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cachemend import ui


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results to this file, for a program.", dir_okay=False)
    ] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="Ask only the first so many questions.")] = None,
) -> None:
    """Show everything working: fetch models, ingest the example corpus, precompute, serve, ask with every method.

    The first run takes some minutes on two cores; the next one skips what is there. Ctrl-C stops all of it.

    Example:  cachemend demo --json demo.json
    """
    from cachemend.demo import run
    from kvcache.settings import load_settings

    result = run(load_settings(), limit=questions)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(ui.to_json(result) + "\n", encoding="utf-8")
        ui.say(f"results in {json_file}")
