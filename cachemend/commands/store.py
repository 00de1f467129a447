# SPDX-License-Identifier: Apache-2.0
"""`cachemend store`: look after the chunk caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cachemend import ui

if TYPE_CHECKING:
    from kvcache.store import ChunkStore

app = typer.Typer(help="The store of chunk caches.", no_args_is_help=True)

REPORT_EVERY = 500


@app.callback()
def _group() -> None:
    """The store of chunk caches."""


@app.command()
def verify(
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete bad objects; they are computed again when needed.")
    ] = False,
    as_json: ui.AsJson = False,
) -> None:
    """Read every object of the store and check its digest, shapes, dtype and owner.

    A bad object never reaches an answer: the service treats it as a miss. This finds it before a user has to wait for
    it. Exit code 1 when bad objects are left.

    Example:  cachemend store verify --delete
    """
    store = _open()
    store.check_target()
    ui.say(f"verifying {store.uri}")

    def progress(checked: int) -> None:
        if checked % REPORT_EVERY == 0:
            ui.say(f"  {checked:,} objects checked")

    report = store.verify(progress, delete=delete)
    if as_json:
        ui.print_json(report)
    else:
        for bad in report.bad:
            ui.out.print(f"{bad.reason}  {bad.path}  {bad.detail}", markup=False, highlight=False, soft_wrap=True)
        done = f", {report.deleted:,} of them deleted" if report.deleted else ""
        ui.out.print(f"{report.objects:,} objects, {len(report.bad):,} bad{done}", highlight=False)
    if len(report.bad) > report.deleted:
        raise typer.Exit(1)


@app.command()
def stats(as_json: ui.AsJson = False) -> None:
    """Count the store's objects, tokens and bytes.

    Example:  cachemend store stats --json
    """
    store = _open()
    found = store.stats()
    if as_json:
        ui.print_json({"uri": store.uri, "stats": found})
        return
    kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(found.by_dtype.items()))
    ui.out.print(
        f"{store.uri}: {found.objects:,} chunks ({kinds or 'empty'}), {found.tokens:,} tokens, {ui.size(found.bytes)}",
        highlight=False,
        soft_wrap=True,
    )


def _open() -> ChunkStore:
    from kvcache.settings import load_settings
    from kvcache.store import ChunkStore

    return ChunkStore.of(load_settings())
