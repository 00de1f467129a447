# SPDX-License-Identifier: Apache-2.0
"""`cachemend sensitivity`: repair methods over chunk length and chunk count, as tables, a figure and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cachemend import ui
from cachemend.commands.evaluate import announced, new_table, number

_METRICS = {
    "log-likelihood of the gold answer, per token": "gold_logprob",
    "KL to full": "kl_to_full",
    "F1": "f1",
    "median TTFT, ms": "ttft_ms",
}


def sensitivity(
    methods: Annotated[str, typer.Option(help="Comma-separated, as for `cachemend evaluate`.")],
    data: Annotated[list[str], typer.Option(help="A data set whose questions have chunks; repeatable.")],
    chunk_tokens: Annotated[
        str, typer.Option(help="Lengths of a chunk, in tokens, comma-separated; empty for no such sweep.")
    ] = "64,128,256,512,1024",
    chunk_counts: Annotated[
        str, typer.Option(help="Numbers of chunks of equal length, comma-separated; empty for no such sweep.")
    ] = "2,4,8,16",
    limit: Annotated[int, typer.Option(min=0, help="Most questions per data set, the first ones; 0 takes all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a question's text.")] = 4096,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.", dir_okay=False, writable=True)
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Write quality against the chunks to this PNG.", dir_okay=False, writable=True)
    ] = None,
    work: Annotated[
        Path, typer.Option(help="Folder of work files, which a stopped run goes on from.", file_okay=False)
    ] = Path("data/evaluation"),
) -> None:
    """Cut the same texts into chunks of other lengths, and into other numbers of chunks, and compare methods on each.

    Prompts keep their tokens: only the chunks' borders move, so full prefill stays what it is. Says first what it
    costs, and can be stopped at any point, like `cachemend evaluate`, whose work files it shares.

    Examples:

      cachemend sensitivity --methods cacheblend,prophetkv,relaxkv --data musique.jsonl --limit 20

      cachemend sensitivity --methods cacherepair --data musique.jsonl --chunk-tokens 128,512 --chunk-counts ""
      --json sensitivity.json --chart sensitivity.png
    """
    from transformers.utils.logging import disable_progress_bar

    from kvcache.settings import load_settings
    from pipelines.evaluate import Evaluation, EvaluationJob
    from pipelines.evaluation.charts import sensitivity as draw
    from pipelines.evaluation.cuts import Cut
    from pipelines.evaluation.sensitivity import sweeps
    from repair.spec import parse_methods

    cuts = [
        *(Cut("tokens", value) for value in _values("--chunk-tokens", chunk_tokens)),
        *(Cut("chunks", value) for value in _values("--chunk-counts", chunk_counts)),
    ]
    if not cuts:
        raise typer.BadParameter("give --chunk-tokens or --chunk-counts")
    disable_progress_bar()
    for path in (json_file, chart):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    job = EvaluationJob(parse_methods(methods), data, limit, max_tokens=max_tokens, work=work, cuts=cuts)
    with ui.stages() as bar:
        evaluation = Evaluation(job, load_settings(), bar)
        ui.say(announced(evaluation.plan()))
        result = evaluation.run()
    found = sweeps(result, data, cuts)
    if json_file is not None:
        tables = {name: result[name] for name in ("data_sets", "config")}
        json_file.write_text(ui.to_json({"sweeps": found, **tables}) + "\n", encoding="utf-8")
    if chart is not None:
        draw(found, Path(result["config"]["target"]["model"]).name, chart)
    for sweep in found:
        _print(sweep)


def _values(option: str, text: str) -> list[int]:
    try:
        values = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        values = [0]
    if values and values[0] < 1:
        raise typer.BadParameter(f"want whole numbers from 1 on, comma-separated, got {text!r}", param_hint=option)
    return values


def _print(sweep: Mapping[str, Any]) -> None:
    by = "tokens of a chunk" if sweep["by"] == "tokens" else "chunks"
    ui.out.print(f"\n{sweep['data']}, by {by}", style="bold", highlight=False)
    if sweep["by"] == "tokens":
        counts = ", ".join(f"{count:.1f}" for count in sweep["chunks"])
        ui.out.print(f"chunks of a question: {counts}", highlight=False)
    for heading, metric in _METRICS.items():
        table = new_table(heading, *map(str, sweep["values"]))
        for label, one in sweep["methods"].items():
            table.add_row(label, *map(number, one[metric]))
        ui.out.print(table)
