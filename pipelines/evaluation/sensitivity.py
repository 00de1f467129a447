# SPDX-License-Identifier: Apache-2.0
"""How much a method depends on chunk length and chunk count (the shape of RelaxKV's Table 6 and CacheRepair's Fig. 15).

An evaluation in which every data set comes once for each cut; this lines its tables up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.evaluation.cuts import Cut, cut_name
from pipelines.evaluation.summary import MEANS, REFERENCE


def sweeps(result: Mapping[str, Any], data: Sequence[str], cuts: Sequence[Cut]) -> list[dict[str, Any]]:
    """A sweep for each data set and kind of cut.

    Args:
        result: of an evaluation over these cuts, see `pipelines.evaluate.Evaluation.run`.
        data: paths of the data sets, as they were evaluated.
        cuts: the cuts.

    Returns:
        `[{"data", "by", "values", "chunks", "methods"}]`: `values` as in `Cut`, ascending; `chunks` a question has on
        average, header chunk not counted; and per method label `{metric: [of each value]}` with the means of
        `evaluation.summary`, `ttft_ms` and `repair_ms` (medians), `recomputed` and `context` (shares of the rows, 0
        where the method has none), and `intervals`: `{metric: [[low, high] of the difference to full]}`.
    """
    found = []
    for path in data:
        for by in dict.fromkeys(cut.by for cut in cuts):
            chosen = sorted((cut for cut in cuts if cut.by == by), key=lambda cut: cut.value)
            names = [cut_name(Path(path).stem, cut) for cut in chosen]
            tables = [result["data_sets"][name] for name in names]
            found.append(
                {
                    "data": Path(path).stem,
                    "by": by,
                    "values": [cut.value for cut in chosen],
                    "chunks": [result["config"]["data"][name]["chunks"] for name in names],
                    "methods": {label: _series(tables, label) for label in result["methods"]},
                }
            )
    return found


def _series(tables: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    methods = [table["methods"][label] for table in tables]
    intervals = [table["intervals"][label] for table in tables]
    return {
        **{name: [one[name] for one in methods] for name in MEANS},
        **{name: [one[name]["p50"] for one in methods] for name in ("ttft_ms", "repair_ms")},
        **{name: [one["shares"].get(name, 0.0) for one in methods] for name in ("recomputed", "context")},
        "intervals": {
            name: [[each[name][f"to_{REFERENCE}"][end] for end in ("low", "high")] for each in intervals]
            for name in MEANS
            if all(name in each for each in intervals)
        },
    }
