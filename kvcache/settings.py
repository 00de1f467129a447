# SPDX-License-Identifier: Apache-2.0
"""Every setting has one home, a default, a unit and a sentence: here.

One file drives the command line, the Ray Data jobs and the Serve application. Values come, strongest first, from
keyword arguments, from the environment (`CACHEMEND_STORE__DTYPE=float16`), and from the YAML file named by
`CACHEMEND_CONFIG` (or `cachemend.yaml` in the working directory when that exists).
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

CONFIG_ENV = "CACHEMEND_CONFIG"
DEFAULT_CONFIG = "cachemend.yaml"

MiB = 2**20
GiB = 2**30

DType = Literal["float16", "bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["block_causal", "token_causal", "bidirectional", "block_diagonal"]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A group of settings: immutable, and closed to names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetSettings(Section):
    """The frozen LLM that answers; everything cached belongs to exactly one target."""

    model: str = "smollm2-135m-instruct"
    """A name `cachemend models fetch` knows, a directory, or a hub id."""
    revision: str | None = None
    """Hub revision (commit hash) to pin; None takes the default branch."""
    dtype: Literal["auto"] | DType = "auto"
    """Compute dtype; auto is float32 on CPU and the checkpoint's own dtype on GPU."""
    device: Device = "auto"
    """Where the target's own passes (precompute, misses) run; auto takes a GPU when there is one."""
    threads: NonNegativeInt = 0
    """Intra-op CPU threads of each process that holds the target; 0 means all cores."""


class EmbeddingSettings(Section):
    """The sentence-transformers model that embeds chunks and questions."""

    model: str = "all-minilm-l6-v2"
    """A name `cachemend models fetch` knows, a directory, or a hub id."""
    device: Device = "auto"
    """Where embeddings are computed."""
    batch_size: PositiveInt = 64
    """Texts per forward pass."""


class ChunkingSettings(Section):
    """How documents become chunks, counted in target-tokenizer tokens."""

    max_tokens: PositiveInt = 256
    """Longest chunk, in tokens, title included."""
    overlap_tokens: NonNegativeInt = 32
    """Tokens that a chunk repeats from the end of the one before it in the same document."""


class StoreSettings(Section):
    """The object store of chunk caches."""

    uri: str | None = None
    """Any location `pyarrow.fs` opens (path, s3://, gs://, hdfs://); None is `<root>/chunk-cache`."""
    dtype: Literal["auto"] | DType = "auto"
    """Dtype of stored keys and values; auto is the target's compute dtype (exact, and the largest)."""
    attempts: PositiveInt = 5
    """Tries of one object operation before it counts as failed (503, SlowDown, time-outs)."""
    retry_base_s: PositiveFloat = 0.1
    """First pause between tries, in seconds; it doubles, with jitter."""
    read_parallelism: PositiveInt = 8
    """Objects read at the same time by one process."""
    deadline_s: PositiveFloat = 5.0
    """Seconds a request waits for its chunks; past it the request falls back to full prefill."""


class HostTierSettings(Section):
    """The bounded host-memory tier in front of the object store, one per repair actor."""

    bytes: NonNegativeInt = 1 * GiB
    """Most bytes of chunk KV held, pinned ones included."""


class HandoffSettings(Section):
    """How a repaired prefix travels from the repair actor to the engine."""

    transport: Literal["auto", "shared_memory", "ray"] = "auto"
    """shared_memory on one node; ray (object transport, a copy more on each side) across nodes. auto takes ray where
    the cluster has more than one node when a repairer starts, a head node without replicas included."""
    arena_bytes: PositiveInt = 512 * MiB
    """Shared memory for hand-offs in flight that each repairer holds, and each engine for those from Ray."""
    lease_s: PositiveFloat = 60.0
    """Seconds after which a hand-off that nobody loaded is taken back."""
    wait_s: PositiveFloat = 10.0
    """Seconds a request waits for free arena memory on either side; past it the engine computes its whole prompt."""


class RetrievalSettings(Section):
    """The FAISS index and how queries use it."""

    index: Literal["flat", "ivf", "hnsw"] = "flat"
    """Kind of FAISS index built by `cachemend ingest`."""
    ivf_nlist: PositiveInt = 256
    """Inverted lists of an ivf index (fewer when the corpus is small)."""
    ivf_nprobe: PositiveInt = 16
    """Inverted lists visited per query."""
    hnsw_m: PositiveInt = 32
    """Links per node of an hnsw index."""
    hnsw_ef_search: PositiveInt = 64
    """Candidate list length of an hnsw search."""
    threads: NonNegativeInt = 1
    """OpenMP threads of an index build or search; 0 means all cores."""
    hybrid: bool = False
    """Fuse dense results with BM25 by reciprocal rank."""
    rrf_k: PositiveInt = 60
    """Constant of reciprocal-rank fusion, 1 / (k + rank)."""
    max_per_document: NonNegativeInt = 0
    """Most chunks of one document in a result; 0 means no limit."""
    top_k: PositiveInt = 5
    """Chunks retrieved when the request does not say."""
    max_top_k: PositiveInt = 64
    """Largest top_k a request may ask for."""


class EngineSettings(Section):
    """The vLLM engine."""

    max_model_len: PositiveInt = 4096
    """Longest prompt plus answer, in tokens."""
    max_num_seqs: PositiveInt = 16
    """Sequences decoded in one batch."""
    max_num_batched_tokens: PositiveInt = 2048
    """Tokens computed in one engine step; a longer prompt takes several, so that others' tokens come in between."""
    kv_cache_bytes: PositiveInt = 1 * GiB
    """Memory of vLLM's paged KV cache on CPU; on GPU vLLM sizes it by gpu_memory_utilization."""
    block_size: PositiveInt | None = None
    """Tokens per KV block; None takes the backend's default (128 on CPU, 16 on GPU)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of GPU memory vLLM may use."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs of one engine."""
    threads: NonNegativeInt = 0
    """OpenMP threads of the CPU worker; 0 means all cores."""
    enforce_eager: bool = True
    """Skip graph capture and compilation: faster start, slower decoding on GPU."""
    startup_proof: bool = True
    """Prove at start that reuse is right for this target, and refuse to serve when it is not."""


class SelectiveSettings(Section):
    """What a request may ask of the methods that run the target LLM again for selected rows."""

    max_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest share of the rows that a request may have chosen; a method's own default is lowered to it."""
    max_window: PositiveInt = 256
    """Most tokens recomputed at the start of every chunk (EPIC), likewise."""


class RepairSettings(Section):
    """Which repair methods the service offers."""

    methods: tuple[str, ...] = ()
    """Registry names offered by the service, see `repair.available()`; empty offers full, stale, and cacherepair where
    a repair network is configured or shipped for the target."""
    default: str = "stale"
    """Method of requests that do not name one."""
    cacherepair: str | None = None
    """Folder or hub id of CacheRepair's network; None takes the one shipped for the target, if there is one."""
    force: bool = False
    """Serve a repair network even when its own validation error is not below that of stale KV."""
    batch_tokens: PositiveInt = 4096
    """Most prefix tokens mended in one pass; requests that wait for the device at the same time share passes."""
    selective: SelectiveSettings = SelectiveSettings()


class PromptSettings(Section):
    """The prompt around the chunks."""

    system: str = "You are a helpful assistant. Answer the question from the given passages."
    """System prompt; with the chat template's opening it forms the header chunk."""
    instruction: str = "Answer with a few words only, without explanation."
    """Sentence put before the question."""
    answer_cue: str = "Answer:"
    """Text that opens the assistant's turn; empty for none."""


class ApiSettings(Section):
    """Bounds on what a client may send."""

    corpus: str = "default"
    """Corpus of requests that do not name one."""
    max_body_bytes: PositiveInt = 1 * MiB
    """Largest request body."""
    max_question_chars: PositiveInt = 32_768
    """Longest question, in characters."""
    default_max_tokens: PositiveInt = 64
    """Answer length when the request does not say, in tokens."""


class AutoscalingSettings(Section):
    """Repairers and engines that follow the load, between their numbers in `serve` and the largest ones here."""

    enabled: bool = False
    """Whether they do; otherwise their numbers are fixed."""
    slo_ttft_s: PositiveFloat = 2.0
    """Objective that they are chosen for: p95 of the time to first token, in seconds."""
    max_repairer_replicas: PositiveInt = 4
    """Most repairers."""
    max_engine_replicas: PositiveInt = 4
    """Most engines."""
    downscale_delay_s: NonNegativeFloat = 60.0
    """Seconds for which fewer must have been enough before any stops."""
    scale_to_zero: bool = False
    """Whether the last ones stop, too, when nothing comes; the first request then waits until both have started."""
    idle_s: NonNegativeFloat = 600.0
    """Seconds for which nothing must have come before they do."""


class ServeSettings(Section):
    """The Ray Serve application."""

    host: str = "127.0.0.1"
    """Address the HTTP proxy binds."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port the HTTP proxy binds."""
    ingress_replicas: PositiveInt = 1
    """Replicas that take HTTP requests."""
    retriever_replicas: PositiveInt = 1
    """Replicas that embed questions and search the index."""
    repairer_replicas: PositiveInt = 1
    """Replicas that fetch and mend chunk caches (a GPU each where there are GPUs)."""
    engine_replicas: PositiveInt = 1
    """Replicas that run vLLM."""
    max_ongoing_requests: PositiveInt = 64
    """Requests one replica of each deployment works on at a time."""
    max_queued_requests: int = 256
    """Requests the ingress queues before it answers 429; docs/autoscaling.md says how many make sense."""
    first_token_timeout_s: PositiveFloat = 120.0
    """Seconds until a request's first token; past it its work is stopped and the client gets 503."""
    shutdown_timeout_s: PositiveFloat = 300.0
    """Seconds a stopping replica has to finish its streams; shorter than `first_token_timeout_s` and a longest answer
    together, it cuts some. (Ctrl-C of `serve run` waits 30 s at most.)"""
    log_encoding: Literal["TEXT", "JSON"] = "TEXT"
    """Of the deployments' logs. Each deployment logs a line per request, see `serve_app.request_log`."""
    autoscaling: AutoscalingSettings = AutoscalingSettings()

    @model_validator(mode="after")
    def _least_and_most(self) -> ServeSettings:
        scaling = self.autoscaling
        if scaling.scale_to_zero and not scaling.enabled:
            raise ValueError("autoscaling.scale_to_zero needs autoscaling.enabled")
        for part, least, most in (
            ("repairer", self.repairer_replicas, scaling.max_repairer_replicas),
            ("engine", self.engine_replicas, scaling.max_engine_replicas),
        ):
            if scaling.enabled and least > most:
                raise ValueError(f"{part}_replicas is {least}, above autoscaling.max_{part}_replicas, {most}")
        return self


class PipelineSettings(Section):
    """The Ray Data jobs."""

    actors: PositiveInt = 1
    """Actors of a job's model stage (one target LLM or embedding model each)."""
    batch_tokens: PositiveInt = 1024
    """Padded tokens per prefill batch of the precompute job."""


class TrainingSettings(Section):
    """Training a repair network, `cachemend train`. The recipe's defaults are those of the published CacheRepair."""

    cache_dir: str = "data/training"
    """Local folder of stale KV and residuals, kept between runs; training works without it, recomputing each visit."""
    cache_bytes: NonNegativeInt = 25 * GiB
    """Most bytes of that folder; what does not fit is computed each time it is visited."""
    cache_dtype: DType = "float16"
    """Dtype of KV in that folder."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Of float32 matrix products, as `torch.set_float32_matmul_precision` has it: below the highest, tensor cores and
    AMX make training two to four times as fast, for an error under 0.1 % of the residual. With medium the network's
    own activations are bfloat16 too (autocast); its weights, loss and optimiser stay float32."""
    max_tokens: PositiveInt = 1024
    """Longest prefix of a training example in tokens, header chunk included; chunks beyond are left out."""
    header_chunk: bool = True
    """Whether the header chunk comes first, as it is served. False as published, as far as is known: passages alone."""
    variants: PositiveInt = 4
    """Arrangements (order, number and choice of chunks) of a group; epoch e visits arrangement e modulo this."""
    held_out: PositiveInt = 24
    """Groups that are never trained on, for validation."""
    statistics_groups: PositiveInt = 256
    """Groups of the statistics pass."""
    groups_per_update: PositiveInt = 4
    """Groups whose gradients are averaged in one update, over all workers."""
    objective: Literal["mse", "huber", "qkv"] = "mse"
    """Loss on the normalised residual; qkv weighs errors of keys by what they change in attention scores."""
    huber_delta: PositiveFloat = 1.0
    """Where the Huber loss turns linear, in units of the residual's RMS."""
    attention: Attention = "block_causal"
    """What a token sees in the network: own chunk and all before (published), or for ablations: own and earlier tokens,
    the whole prefix, or its own chunk only."""
    reinject: bool = True
    """Give every block the encoded stale KV again (published); false gives it at the entrance only."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw is published; muon, on the network's matrices, needs a third of the updates where updates are few."""
    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    min_learning_rate: NonNegativeFloat = 3e-5
    """Learning rate at the last update, reached on a cosine."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the updates with a linearly growing learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's denominator floor."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay, on all parameters."""
    clip_norm: PositiveFloat = 1.0
    """Largest gradient norm of an update."""
    initial_gate: float = 0.0
    """Start value of the blocks' gates; 0 (published) makes blocks the identity, 1 lets a short run learn sooner."""
    residual_floor: NonNegativeFloat = 1e-3
    """Least RMS of a residual coordinate, relative to the stale RMS; below it a coordinate has no loss weight."""
    seed: NonNegativeInt = 7
    """Seed of the held-out choice, the epochs' order and the arrangements."""
    initialization_seed: NonNegativeInt = 853_119_240
    """Seed of the fresh network's weights."""
    checkpoint_every: PositiveInt = 100
    """Updates between two checkpoints."""
    validate_every: PositiveInt = 100
    """Updates between two validations."""
    workers: PositiveInt = 1
    """Training workers, one target LLM each."""


class Settings(BaseSettings):
    """All of CacheMend's settings."""

    model_config = SettingsConfigDict(
        env_prefix="CACHEMEND_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    root: str = "data"
    """Where corpora, indexes and (by default) chunk caches live: any location `pyarrow.fs` opens."""
    models_dir: str = "models"
    """Local directory of fetched models."""
    target: TargetSettings = TargetSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    chunking: ChunkingSettings = ChunkingSettings()
    store: StoreSettings = StoreSettings()
    host_tier: HostTierSettings = HostTierSettings()
    handoff: HandoffSettings = HandoffSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    repair: RepairSettings = RepairSettings()
    engine: EngineSettings = EngineSettings()
    prompt: PromptSettings = PromptSettings()
    api: ApiSettings = ApiSettings()
    serve: ServeSettings = ServeSettings()
    pipeline: PipelineSettings = PipelineSettings()
    training: TrainingSettings = TrainingSettings()

    @field_validator("models_dir")
    @classmethod
    def _expand(cls, value: str) -> str:
        return str(Path(value).expanduser())

    @property
    def store_uri(self) -> str:
        """Location of the chunk-cache store."""
        return self.store.uri or _below(self.root, "chunk-cache")

    @property
    def corpora_uri(self) -> str:
        """Location of the corpora, a folder each."""
        return _below(self.root, "corpora")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get(CONFIG_ENV)
        if path and not Path(path).is_file():
            raise SettingsError(f"{CONFIG_ENV} names {path}, which is not a file")
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=path or DEFAULT_CONFIG)


def _below(location: str, folder: str) -> str:
    # The query of a URI carries the file system's options (s3://bucket/prefix?region=...): it stays at the end.
    path, mark, query = location.partition("?") if "://" in location else (location, "", "")
    return f"{path.rstrip('/')}/{folder}{mark}{query}"


class SettingsError(ValueError):
    """The settings cannot be used; the message says which key, why, and what was meant."""


def load_settings(**overrides: Any) -> Settings:
    """Read the settings; `overrides` (nested dicts) win over environment and file.

    Raises:
        SettingsError: a key is unknown (the nearest valid one is named) or a value is out of range.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(e) for e in error.errors())) from None


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"setting {key}: {error['msg']} (got {error['input']!r})"
    model: Any = Settings
    for part in error["loc"][:-1]:
        model = model.model_fields[part].annotation
    name, known = str(error["loc"][-1]), list(model.model_fields)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"setting {key}: no such setting; the nearest is {nearest[0]!r} (all: {', '.join(known)})"
