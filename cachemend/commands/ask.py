# SPDX-License-Identifier: Apache-2.0
"""`cachemend ask`: one question to a running service."""

from __future__ import annotations

from typing import Annotated

import typer

from cachemend import ui


def ask(
    question: Annotated[str, typer.Argument(help="The question, in quotes.")],
    method: Annotated[str | None, typer.Option(help="Repair method, for example full or stale.")] = None,
    corpus: Annotated[str | None, typer.Option(help="Corpus to search; the service's default when left out.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Chunks to retrieve.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the service; http://HOST:PORT of the settings when left out.")
    ] = None,
    as_json: ui.AsJson = False,
) -> None:
    """Ask a running service; the answer streams in, then its citations and where the time went.

    Examples:

      cachemend ask "Who is the General Manager of the Broncos?" --corpus demo

      cachemend ask "Who is the General Manager of the Broncos?" --corpus demo --method full --json
    """
    from cachemend.client import Client, default_url
    from kvcache.settings import load_settings

    client = Client(url or default_url(load_settings()))
    show = (lambda _: None) if as_json else (lambda text: ui.out.print(text, end="", markup=False, highlight=False))
    answer = client.ask(question, method=method, corpus=corpus, top_k=top_k, max_tokens=max_tokens, on_text=show)
    if as_json:
        ui.print_json(answer)
        return
    ui.out.print("\n")
    for number, cited in enumerate(answer.citations, start=1):
        ui.out.print(
            f"[{number}] {cited.get('title') or cited.get('document_id')}  "
            f"(chunk {cited.get('chunk_id')}, score {cited.get('score', 0):.3f})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    ui.say(
        f"\nfirst token after {ui.duration(answer.ttft_s)}, all after {ui.duration(answer.total_s)}; "
        f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens came from the cache"
    )
    ui.say(f"time: {answer.where_time_went()}")
