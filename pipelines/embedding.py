# SPDX-License-Identifier: Apache-2.0
"""The second half of ingest: texts to vectors, in a pool of actors. Imports little: every actor pays for it."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.data

from kvcache.settings import Settings
from pipelines.ray_data import Progress, quiet_ray_data
from retrieval.embedding import TextEmbedder

EmbedderFactory = Callable[[Settings], TextEmbedder]


def embed_texts(texts: pa.ChunkedArray, settings: Settings, embedder: EmbedderFactory, progress: Progress) -> pa.Array:
    """Embed texts in a pool of actors, one embedding model each.

    Returns:
        Unit vectors, fixed-size lists of float32, in the order of the texts.
    """
    batch = settings.embedding.batch_size
    table = pa.table({"row": pa.array(range(len(texts)), pa.int64()), "text": texts})
    table = table.take(pc.sort_indices(pc.utf8_length(table["text"])))  # texts of like length share a forward pass
    blocks = [table.slice(start, batch) for start in range(0, len(table), batch)]
    with quiet_ray_data():
        gpus = ray.cluster_resources().get("GPU", 0) if settings.embedding.device != "cpu" else 0
        pool = ray.data.ActorPoolStrategy(size=min(settings.pipeline.actors, len(blocks)))
        vectors = ray.data.from_arrow(blocks).map_batches(
            _Embed,
            batch_size=batch,
            batch_format="pyarrow",
            compute=pool,
            num_gpus=1 if gpus else None,
            fn_constructor_args=(settings, embedder),
        )
        done, parts = 0, []
        progress("embed", 0, len(table))
        for part in vectors.iter_batches(batch_size=None, batch_format="pyarrow"):
            parts.append(part)
            done += len(part)
            progress("embed", done, len(table))
    return pa.concat_tables(parts).sort_by("row")["embedding"].combine_chunks()


class _Embed:
    def __init__(self, settings: Settings, embedder: EmbedderFactory) -> None:
        self._embedder = embedder(settings)

    def __call__(self, batch: pa.Table) -> pa.Table:
        vectors = self._embedder.embed(batch["text"].to_pylist())
        lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        return pa.table({"row": batch["row"], "embedding": lists})
