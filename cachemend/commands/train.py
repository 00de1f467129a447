# SPDX-License-Identifier: Apache-2.0
"""`cachemend train`: a repair network of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cachemend import ui
from cachemend.commands.corpus import ray_session


def train(
    groups: Annotated[
        Path,
        typer.Argument(
            help='JSONL of token groups: {"chunks": [[ids], ...]}, or {"passages": [id, ...]} with --passages.',
            exists=True,
            dir_okay=False,
        ),
    ],
    output: Annotated[Path, typer.Option(help="Directory for checkpoint, state and loss curve.", file_okay=False)],
    passages: Annotated[
        Path | None, typer.Option(help='JSONL of passages: {"id": ..., "text": ...}.', exists=True, dir_okay=False)
    ] = None,
    size: Annotated[str, typer.Option(help="Capacity of the network: S, M or L.")] = "S",
    updates: Annotated[int, typer.Option(min=1, help="Updates in all; the learning rate ends with them.")] = 100_000,
    limit: Annotated[int, typer.Option(min=0, help="Most groups to train on; 0 takes all.")] = 0,
    init_from: Annotated[
        str | None, typer.Option(help="Checkpoint to begin with, a folder or hub id; else the network is fresh.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what the run would cost.")] = False,
    as_json: ui.AsJson = False,
) -> None:
    """Train a repair network for the target LLM, on groups of chunks that a prompt may hold together.

    Says first what the run costs. It can be stopped at any point; the same command goes on exactly where the last
    state was saved. The checkpoint in the output directory is the best so far on held-out groups. The recipe is the
    `training` section of the settings.

    Example:  cachemend train groups.jsonl --passages passages.jsonl --updates 2000 --output repairers/mine
    """
    from kvcache.settings import load_settings
    from pipelines import train as job

    settings = load_settings()
    with ray_session():
        plan = job.plan(groups, passages, size, updates, output, settings, limit, init_from)
        ui.say(
            f"size {size}: {plan.parameters:,} parameters; {plan.groups:,} groups to train on, "
            f"{plan.held_out} held out; {plan.updates:,} updates over {plan.tokens:,} tokens\n"
            f"with nothing cached the target reads {plan.prefill_tokens:,} tokens and its KV takes "
            f"{ui.size(plan.bytes)} in {settings.training.cache_dir}; about {ui.duration(plan.seconds_estimate)} in all"
        )
        if dry_run:
            if as_json:
                ui.print_json({"plan": plan})
            return
        with ui.stages() as bar:

            def progress(line: dict[str, Any]) -> None:
                bar("train", line["update"], updates)
                if "validation" in line:
                    ui.say(_errors(line["update"], line["validation"]))

            report = job.train(plan, settings, progress)
    if as_json:
        ui.print_json({"plan": plan, "report": report})
    else:
        ui.say(f"best checkpoint in {report.output}")


def _errors(update: int, found: dict[str, Any]) -> str:
    stale, repaired = found["stale"], found["repaired"]
    return (
        f"update {update:,}: normalised error {repaired['nmse']:.3f} (stale {stale['nmse']:.3f}), "
        f"relative RMS of K {repaired['k']['all']:.3f} ({stale['k']['all']:.3f}), "
        f"of V {repaired['v']['all']:.3f} ({stale['v']['all']:.3f})"
    )
