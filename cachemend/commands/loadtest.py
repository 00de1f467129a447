# SPDX-License-Identifier: Apache-2.0
"""`cachemend loadtest`: throughput and latency of a running service under load."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from cachemend import ui

if TYPE_CHECKING:
    from cluster.loadtest.compare import Comparison
    from cluster.loadtest.rows import Row
    from cluster.loadtest.run import LoadTest, Plan
    from cluster.loadtest.workload import Question

Number = TypeVar("Number", int, float)

_CLOSED = (1, 2, 4, 8)
_REFERENCE = "full"
_UNSTEADY = 0.9
_STEADY = 1.1
_PANEL = "Comparing two runs"


def loadtest(
    url: Annotated[
        str | None, typer.Option(help="Address of the service; http://HOST:PORT of the settings when left out.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated repair methods.")] = "full,stale",
    concurrency: Annotated[
        str | None,
        typer.Option(help="Closed loop: requests outstanding, comma-separated. 1,2,4,8 when no other load is given."),
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Open loop: arrivals per second at random (Poisson) times, comma-separated.")
    ] = None,
    ramp: Annotated[
        str | None, typer.Option(help="Closed loop over time: requests outstanding, a step each, comma-separated.")
    ] = None,
    step_s: Annotated[float, typer.Option("--step-s", min=1.0, help="Seconds of a step of the ramp.")] = 30.0,
    requests: Annotated[int, typer.Option(min=1, help="Counted requests per method and load.")] = 32,
    warmup: Annotated[int, typer.Option(min=1, help="Requests per method before everything, not counted.")] = 2,
    questions: Annotated[
        Path | None,
        typer.Option(
            help="JSONL with question and, for F1, answers; the repository's examples when left out.", dir_okay=False
        ),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(help="Corpus to search. Left out: demo for the examples if there is one, else the service's."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Chunks to retrieve.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 16,
    slo_ttft_ms: Annotated[
        float | None, typer.Option("--slo-ttft-ms", min=0.0, help="Objective for the time to first token; for goodput.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the questions' order, the methods' turns and the arrivals.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers to this file.", dir_okay=False, writable=True)
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Write a CSV line per request to this file.", dir_okay=False, writable=True)
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Write the curves to this PNG.", dir_okay=False, writable=True)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Load nothing; compare two files that --json wrote.", rich_help_panel=_PANEL),
    ] = None,
) -> None:
    """Measure throughput, time to first token and end-to-end time of a running service under load.

    All methods and loads are measured in one run and take turns, so that a machine that changes falls on all alike; a
    service that scales itself is to be measured with --ramp, or with its replicas fixed. Times are the client's:
    whatever a request waits for counts. Every question begins with a number of its own, so that no cache above the
    service can answer it. A client that is refused waits as long as the service asks (Retry-After). Ctrl-C, or an error
    on the way, writes what there is.

    Examples:

      cachemend loadtest --methods full,stale,cacherepair --concurrency 1,2,4,8 --requests 32 --json a.json
      --rows a.csv --chart a.png

      cachemend loadtest --methods stale --rate 0.5,1,2 --requests 60 --slo-ttft-ms 500

      cachemend loadtest --methods stale --ramp 1,4,8,2 --step-s 60 --chart ramp.png

      cachemend loadtest --compare a.json b.json
    """
    if compare is not None:
        _compare(*compare, json_file)
        return
    from cachemend.client import default_url
    from cluster.loadtest.run import LoadTest, Plan
    from cluster.loadtest.workload import Workload
    from kvcache.settings import load_settings

    if ramp is not None and (concurrency is not None or rate is not None):
        raise typer.BadParameter("a ramp is a run of its own: leave out --concurrency and --rate")
    closed = _numbers("--concurrency", concurrency, int) or (_CLOSED if rate is None and ramp is None else ())
    plan = Plan(
        url=_checked_url(url or default_url(load_settings())),
        methods=_names(methods),
        concurrency=closed,
        rates=_numbers("--rate", rate, float),
        requests=requests,
        warm_up=warmup,
        seed=seed,
        slo_ttft_ms=slo_ttft_ms,
        ramp=_numbers("--ramp", ramp, int),
        step_s=step_s,
    )
    for path in (json_file, rows, chart):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)  # found out now, not after the run
    asked, corpora = _questions(questions, corpus)
    rag = {} if top_k is None else {"top_k": top_k}
    test = LoadTest(plan, Workload(asked, seed, max_tokens, rag), corpora)
    try:
        _measure(test)
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        # Before the first counted request there is nothing to keep, and what an earlier run wrote is worth more.
        if any(row.phase == "counted" for row in test.rows):
            _write_partial(test, json_file, rows, chart, "Ctrl-C" if stopped else "an error")
        elif stopped:
            ui.say("stopped by Ctrl-C before anything was measured; no file was written")
        if stopped:
            raise typer.Exit(130) from None
        raise
    _write(test, json_file, rows, chart)


def _measure(test: LoadTest) -> None:
    plan = test.plan
    ui.say(f"{plan.url}: warming up {', '.join(plan.methods)}")
    test.warmed = lambda rows: ui.say(_announced(plan, _alone_s(rows)))
    with ui.stages() as bar:
        if plan.ramp:
            test.tell = lambda block, seconds: bar(
                f"{block.method}, ramp (s)", seconds, round(plan.step_s * len(plan.ramp))
            )
        else:
            sent, all_of_them = itertools.count(1), plan.requests_in_all()
            test.tell = lambda *_: bar("requests", next(sent), all_of_them)
        asyncio.run(test.run())


def _announced(plan: Plan, seconds_each: float) -> str:
    if plan.ramp:
        return f"a ramp of {len(plan.ramp)} steps: {ui.duration(plan.step_s * len(plan.ramp) * len(plan.methods))}"
    count = plan.requests_in_all()
    return (
        f"{len(plan.methods)} methods under {len(plan.loads)} loads, {count:,} requests; a request alone took "
        f"{ui.duration(seconds_each)}: about {ui.duration(count * seconds_each)} where nothing runs at the same time"
    )


def _alone_s(warm_up: Sequence[Row]) -> float:
    """Seconds of one request: each method's last of the warm-up (its first pays for one-time work), averaged."""
    last = {row.method: row.e2e_ms / 1e3 for row in warm_up}
    return sum(last.values()) / len(last)


def _questions(path: Path | None, corpus: str | None) -> tuple[list[Question], list[str | None]]:
    from cachemend.examples import CORPUS, EXAMPLES
    from cluster.loadtest.workload import read_questions

    if path is not None:
        return read_questions(path), [corpus]
    return read_questions(EXAMPLES / "questions.jsonl"), [corpus] if corpus else [CORPUS, None]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise typer.BadParameter(f"--methods {text!r}: give each method once, comma-separated")
    return names


def _numbers(option: str, text: str | None, kind: Callable[[str], Number]) -> list[Number]:
    if text is None:
        return []
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < one < 1e6 for one in found):
        raise typer.BadParameter(f"{option} {text!r}: give numbers above zero, comma-separated")
    if option != "--ramp" and len(set(found)) < len(found):
        raise typer.BadParameter(f"{option} {text!r}: give each number once")
    return found


def _checked_url(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise typer.BadParameter(f"--url {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise typer.BadParameter(f"--url {url!r}: give an address like http://127.0.0.1:8000")
    return url.rstrip("/")


def _write_partial(test: LoadTest, json_file: Path | None, rows: Path | None, chart: Path | None, by: str) -> None:
    _write(test, json_file, rows, chart)
    ended = sum(len(block.rows) for block in test.blocks)
    ui.error(f"stopped by {by}: these are partial results, of {ended} requests; the files say so too")


def _write(test: LoadTest, json_file: Path | None, rows: Path | None, chart: Path | None) -> None:
    from cluster.loadtest.charts import load_curves, ramp_chart
    from cluster.loadtest.rows import write_rows

    report = test.report()
    if json_file is not None:
        json_file.write_text(ui.to_json(report) + "\n", encoding="utf-8")
    if rows is not None:
        write_rows(test.rows, rows)
    if test.plan.ramp and not test.samples:
        ui.say("the service's /metrics do not tell its replicas (on a cluster the head node's do): none are drawn")
    if chart is not None and report["cells"]:
        (ramp_chart if test.plan.ramp else load_curves)(report, chart)
    _print(report["cells"])


def _print(cells: Sequence[Mapping[str, Any]]) -> None:
    from cluster.loadtest.compare import ratios_to

    goodput = any(cell["goodput_rps"] is not None for cell in cells)
    times = _table("load", "method", "req/s", "TTFT, ms", "end to end, ms", *(["goodput"] if goodput else []), "errors")
    times.caption = "times: median / 95th percentile"
    more = _table("load", "method", "ITL, ms", "cached", "F1", "X·R/C", "req/s vs full", "TTFT vs full")
    more.caption = "ITL: median; cached: prompt tokens; vs full: throughput, p95 TTFT, higher is better"
    ratios = ratios_to(cells, _REFERENCE)
    for index, cell in enumerate(cells):
        name = _load(cell), cell["method"]
        spreads = (f"{_ms(cell[key]['p50'])} / {_ms(cell[key]['p95'])}" for key in ("ttft_ms", "e2e_ms"))
        good = [_number(cell["goodput_rps"])] if goodput else []
        times.add_row(*name, _number(cell["throughput_rps"]), *spreads, *good, str(cell["errors"]))
        cached = "" if cell["cached_tokens"] is None else f"{cell['cached_tokens']:,.0f}"
        against = (f"{ratio:.2f}x" for ratio in ratios.get(index, ()))
        more.add_row(
            *name, _ms(cell["itl_ms"]["p50"]), cached, _number(cell["f1"]), _number(cell["little_ratio"]), *against
        )
    ui.out.print(times)
    ui.out.print(more)
    for cell in cells:
        for kind, count in cell["errors_by_kind"].items():
            ui.say(f"{cell['method']}, {_load(cell)}: {count} of {cell['requests']} requests failed: {kind}")
        if cell["little_ratio"] is not None and cell["little_ratio"] < _UNSTEADY:
            ui.say(
                f"{cell['method']}, {_load(cell)}: X * R is {cell['little_ratio']:.2f} of C: "
                "the load was not steady; more --requests help"
            )
    _say_how_steady(cells)


def _say_how_steady(cells: Sequence[Mapping[str, Any]]) -> None:
    known = sorted((c for c in cells if c.get("slowness")), key=lambda cell: cell["slowness"])
    if known and (changed := known[-1]["slowness"] / known[0]["slowness"]) > _STEADY:
        fastest, slowest = (f"{cell['method']}, {_load(cell)}" for cell in (known[0], known[-1]))
        ui.say(
            f"the service itself was not equally fast throughout: the same request alone took {changed:.2f} times as "
            f"long around {slowest} as around {fastest}; methods under one load are compared more safely than loads"
        )


def _load(cell: Mapping[str, Any]) -> str:
    step = "" if cell.get("step") is None else f"step {cell['step'] + 1}, "
    return step + (f"C={cell['concurrency']}" if cell["concurrency"] is not None else f"{cell['rate_rps']:g}/s")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for heading in headings:
        named = heading in ("load", "method", "metric")
        table.add_column(heading, justify="left" if named else "right", overflow="fold")
    return table


def _compare(before: Path, after: Path, json_file: Path | None) -> None:
    from cluster.loadtest.compare import Report, compare, differences

    reports = [Report.read(path) for path in (before, after)]
    found: list[Comparison] = compare(*reports)
    for path, report in zip((before, after), reports, strict=True):
        if not report.config.get("complete", True):
            ui.say(f"{path} is partial: its run was stopped")
    for name, one, other in differences(*reports):
        ui.say(f"the runs are not alike: {name} was {one} before and is {other} after")
    if json_file is not None:
        json_file.write_text(ui.to_json(found) + "\n", encoding="utf-8")
    ui.say(f"before: {before}, after: {after}; ratio: after through before; * where its interval leaves out 1")
    table = _table("load", "method", "metric", "before", "after", "ratio", "95 % interval")
    for one in found:
        cell = {"concurrency": one.concurrency, "rate_rps": one.rate_rps, "step": one.step}
        interval = "" if one.low is None else f"{one.low:.2f} to {one.high:.2f}"
        values = ("" if value is None else f"{value:,.2f}" for value in (one.before, one.after))
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}{'*' if one.differs else ''}"
        table.add_row(_load(cell), one.method, one.metric, *values, ratio, interval)
    ui.out.print(table)
