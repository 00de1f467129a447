# SPDX-License-Identifier: Apache-2.0
"""The JSON of a load test (`cachemend loadtest --json`), as far as the capacity model reads it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from cluster.capacity.model import Method

STANDS_FOR: dict[str, Method] = {"full": "full", "stale": "stale", "repaired": "repaired", "cacherepair": "repaired"}
"""Names of repair methods in load tests, and which of the three modelled methods they are."""


class LoadTestError(ValueError):
    """The file cannot be used; the message names it, the field, and what was expected."""


class Percentiles(BaseModel):
    """Milliseconds; what was not measured is None."""

    model_config = ConfigDict(extra="ignore")

    p50: PositiveFloat | None = None
    p95: PositiveFloat | None = None


class Cell(BaseModel):
    """One method at one number of clients."""

    model_config = ConfigDict(extra="ignore")

    method: str
    concurrency: PositiveInt
    requests: PositiveInt = 256
    throughput_rps: PositiveFloat
    ttft_ms: Percentiles = Percentiles()
    e2e_ms: Percentiles = Percentiles()

    @property
    def modelled(self) -> Method | None:
        """The modelled method it is, if it is one."""
        return STANDS_FOR.get(self.method)


class LoadTest(BaseModel):
    """A closed-loop load test."""

    model_config = ConfigDict(extra="ignore")

    cells: list[Cell] = Field(min_length=1)

    def at(self, concurrency: int) -> list[Cell]:
        """Cells of the modelled methods at that many clients."""
        return [cell for cell in self.cells if cell.concurrency == concurrency and cell.modelled]

    @property
    def concurrencies(self) -> list[int]:
        """Numbers of clients at which a modelled method was measured, ascending."""
        return sorted({cell.concurrency for cell in self.cells if cell.modelled})


def read_load_test(path: Path) -> LoadTest:
    """Read and check the file.

    Raises:
        LoadTestError: not there, not JSON, a field missing or out of range, or no method that is modelled.
    """
    try:
        found = LoadTest.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadTestError(f"{path}: {error.strerror}; `cachemend loadtest --json FILE` writes one") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the whole file"
        raise LoadTestError(f"{path}: {field}: {first['msg']}") from error
    if not found.concurrencies:
        methods = ", ".join(sorted({cell.method for cell in found.cells}))
        raise LoadTestError(f"{path}: has cells of {methods} only; the model knows {', '.join(STANDS_FOR)}")
    return found
