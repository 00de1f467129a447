# SPDX-License-Identifier: Apache-2.0
"""Two methods of a `cachemend evaluate` run against each other, on the same questions, with a paired 95 % interval.

    python -m benchmarks.paired data/evaluation/WORK_FILE.jsonl prophetkv:preset=0.1 epic:preset=8

`config.work_file` in the run's JSON names the work file. The run itself compares each method with full prefill and with
stale reuse; this compares any two, by the same draws.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipelines.evaluation.bootstrap import paired_difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="work file of the run")
    parser.add_argument("methods", nargs="+", help="pairs: each method and the one that it is compared with")
    parser.add_argument("--metric", default="kl_to_full", help="as in the rows' `metrics`")
    options = parser.parse_args()
    if len(options.methods) % 2:
        parser.error("methods come in pairs")
    values: dict[str, dict[str, float]] = {}
    for row in map(json.loads, options.work.read_text(encoding="utf-8").splitlines()):
        values.setdefault(row["method"].split("#")[0], {})[row["request"]] = row["metrics"][options.metric]
    if unknown := set(options.methods) - set(values):
        parser.error(f"no rows of {', '.join(sorted(unknown))}; there are: {', '.join(sorted(values))}")
    for method, other in zip(options.methods[::2], options.methods[1::2], strict=True):
        both = sorted(values[method].keys() & values[other].keys())
        found = paired_difference([values[method][one] for one in both], [values[other][one] for one in both])
        interval = f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
        print(f"{method} - {other}: {interval}, {found.requests} questions")


if __name__ == "__main__":
    main()
