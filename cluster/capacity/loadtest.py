# SPDX-License-Identifier: Apache-2.0
"""The JSON of a load test (`cachemend loadtest --json`), as far as the capacity model reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from cluster.capacity.model import Method

STANDS_FOR: dict[str, Method] = {"full": "full", "stale": "stale", "repaired": "repaired", "cacherepair": "repaired"}
"""Names of repair methods in load tests, and which of the three modelled methods they are."""


class LoadTestError(ValueError):
    """The file cannot be used; the message names it, the field, and what was expected."""


Measured = Annotated[PositiveFloat | None, BeforeValidator(lambda value: value or None)]
"""Nothing takes no time: a zero was not measured either."""


class Percentiles(BaseModel):
    """Milliseconds; what was not measured is None."""

    model_config = ConfigDict(extra="ignore")

    p50: Measured = None
    p95: Measured = None


class StageTimes(BaseModel):
    """What the service says of its stages, waiting for them included."""

    model_config = ConfigDict(extra="ignore")

    retrieve: Percentiles = Percentiles()
    mend: Percentiles = Percentiles()
    first_token: Percentiles = Percentiles()


class Samples(BaseModel):
    """Tokens of each answered request of a cell."""

    model_config = ConfigDict(extra="ignore")

    prompt: list[NonNegativeInt] = []
    completion: list[NonNegativeInt] = []


class Cell(BaseModel):
    """One method at one number of clients; cells of an open loop or of a ramp's step are left aside."""

    model_config = ConfigDict(extra="ignore")

    method: str
    concurrency: PositiveInt | None
    step: NonNegativeInt | None = None
    """Of a ramp: what a step measures still belongs in part to the step before it."""
    requests: PositiveInt = 256
    throughput_rps: NonNegativeFloat
    ttft_ms: Percentiles = Percentiles()
    e2e_ms: Percentiles = Percentiles()
    itl_ms: Percentiles = Percentiles()
    """Between pieces of text, which may hold several tokens or come in bursts; see `tpot_ms`."""
    tpot_ms: Percentiles = Percentiles()
    """Per token after the first, over a whole answer."""
    stages_ms: StageTimes = StageTimes()
    prompt_tokens: PositiveFloat | None = None
    """Mean tokens of a prompt, question included."""
    completion_tokens: PositiveFloat | None = None
    """Mean tokens of an answer."""
    samples_tokens: Samples = Samples()
    slowness: Measured = None
    """How long a reference request took around the cell's blocks, relative to the run's median."""

    @property
    def modelled(self) -> Method | None:
        """The modelled method it is, if it is one, was measured in a steady closed loop, and answered anything."""
        steady = self.concurrency and self.step is None
        return STANDS_FOR.get(self.method) if steady and self.throughput_rps else None


class Config(BaseModel):
    """How it was measured."""

    model_config = ConfigDict(extra="ignore")

    complete: bool = True
    """False when the run was stopped before its end."""
    blocks: list[tuple[str, int | None, float | None]] = []
    """Method, clients and arrival rate of each block of requests that was sent."""


class LoadTest(BaseModel):
    """A closed-loop load test."""

    model_config = ConfigDict(extra="ignore")

    cells: list[Cell] = Field(min_length=1)
    config: Config = Config()

    def at(self, concurrency: int) -> list[Cell]:
        """Cells of the modelled methods at that many clients."""
        return [cell for cell in self.cells if cell.concurrency == concurrency and cell.modelled]

    @property
    def concurrencies(self) -> list[int]:
        """Numbers of clients at which a modelled method was measured, ascending."""
        return sorted({cell.concurrency for cell in self.cells if cell.modelled and cell.concurrency})

    def blocks(self, cell: Cell) -> int:
        """How many blocks, each behind a lead-in, a cell was measured in; 0 when the file does not say."""
        return sum(block[:2] == (cell.method, cell.concurrency) for block in self.config.blocks)

    def samples(self, name: Literal["prompt", "completion"]) -> tuple[int, ...]:
        """Tokens of all cells' prompts or answers; none from a file that does not have them."""
        return tuple(tokens for cell in self.cells for tokens in getattr(cell.samples_tokens, name) if tokens)

    def mean(self, field: str) -> float | None:
        """Mean over the cells of a field that they may have."""
        found = [getattr(cell, field) for cell in self.cells if getattr(cell, field) is not None]
        return sum(found) / len(found) if found else None


def read_load_test(path: Path) -> LoadTest:
    """Read and check the file.

    Raises:
        LoadTestError: not there, not JSON, a field missing or out of range, a run that was stopped early, or no method
            that is modelled.
    """
    try:
        found = LoadTest.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadTestError(f"{path}: {error.strerror}; `cachemend loadtest --json FILE` writes one") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the whole file"
        raise LoadTestError(f"{path}: {field}: {first['msg']}") from error
    if not found.config.complete:
        raise LoadTestError(f"{path}: config.complete: the run was stopped early; run it again to its end")
    if not found.concurrencies:
        methods = ", ".join(sorted({cell.method for cell in found.cells}))
        raise LoadTestError(
            f"{path}: no steady closed loop of a method that is modelled ({', '.join(STANDS_FOR)}); it has {methods}"
        )
    return found
