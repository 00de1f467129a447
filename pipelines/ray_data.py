# SPDX-License-Identifier: Apache-2.0
"""What the Ray Data jobs have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import ray.data

Progress = Callable[[str, int, int | None], None]
"""Told (stage, done, total); total None while unknown."""


class JobStoppedError(RuntimeError):
    """An actor of a job failed; the message is the error's own last line."""


@contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Without Ray Data's own progress bars: the caller shows one of its own."""
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = before


def run_in_actors(
    actor: type, arguments: tuple[Any, ...], tables: Sequence[pa.Table], actors: int, resources: dict[str, float]
) -> Iterator[pa.Table]:
    """Put tables through a pool of actors, each table whole and in one task.

    Args:
        actor: called with a table, yields tables.
        arguments: of its constructor.
        tables: none is empty.
        actors: most of them.
        resources: of each, `num_cpus` and `num_gpus`.

    Yields:
        What the actors yield, in the order in which it is ready.

    Raises:
        JobStoppedError: an actor failed.
    """
    with quiet_ray_data():
        # `from_blocks` keeps one table one task; `from_arrow` would start a task for each just to read its schema.
        rows = ray.data.from_blocks(list(tables)).map_batches(
            actor,
            batch_size=max(table.num_rows for table in tables),
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=min(actors, len(tables))),
            fn_constructor_args=arguments,
            **resources,
        )
        try:
            yield from rows.iter_batches(batch_size=None, batch_format="pyarrow")
        except ray.exceptions.RayError as error:
            # The last line of Ray's text names the error; the traceback before it stays in the cause.
            raise JobStoppedError(str(error).strip().splitlines()[-1]) from error
