# SPDX-License-Identifier: Apache-2.0
"""The chunk-cache object: a safetensors file whose every byte is checked before use.

Layout: 8 bytes header length, a JSON header padded with spaces to `HEADER_BYTES` in all, then keys and values, each
`[L, T, H, D]`. `safetensors` itself reads such a file. The header is written and read here and not by that library,
because its loader copies every tensor out of the buffer, and because a header must not only parse but be, byte for
byte, the one that belongs to this chunk, target, shape and dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from kvcache.chunk import FORMAT_VERSION, ChunkKV, chunk_key, token_digest
from kvcache.geometry import Geometry

HEADER_BYTES = 1024
"""Fixed size of length and header, so that an object's size follows from its token count, and tensors are aligned."""

_JSON_BYTES = HEADER_BYTES - 8
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class MissReason(StrEnum):
    """Why a chunk's KV could not be had from the store."""

    absent = "absent"
    """No such object."""
    truncated = "truncated"
    """The object ends early."""
    corrupt = "corrupt"
    """The payload is not the one that was written."""
    header = "header"
    """The header cannot be read or is not one we write."""
    format_version = "format_version"
    """Another version of the object format."""
    foreign_target = "foreign_target"
    """KV of another model, revision or compute dtype."""
    wrong_tokens = "wrong_tokens"
    """KV of another chunk."""
    wrong_shape = "wrong_shape"
    """Other shapes or another storage dtype than the store's."""
    unreadable = "unreadable"
    """An I/O error, after retries."""
    timeout = "timeout"
    """No answer in time."""

    @property
    def damaged(self) -> bool:
        """Whether an object was there, and was not what its name promises."""
        return self not in (MissReason.absent, MissReason.unreadable, MissReason.timeout)


class ChunkMiss(Exception):
    """A chunk's KV is not to be had from the store: compute it.

    Attributes:
        reason: why.
        key: the chunk's key.
        detail: what was found, for the log.
    """

    def __init__(self, reason: MissReason, key: str, detail: str) -> None:
        super().__init__(reason, key, detail)
        self.reason = reason
        self.key = key
        self.detail = detail

    def __str__(self) -> str:
        return f"chunk {self.key[:12]}: {self.reason}: {self.detail}"


@dataclass(frozen=True)
class ObjectFormat:
    """How one target's chunks are written: everything a header says that is not the chunk's own.

    Attributes:
        fingerprint: the target's, lower-case hex.
        geometry: the target's.
        dtype: of the stored keys and values.
    """

    fingerprint: str
    geometry: Geometry
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"chunks cannot be stored as {self.dtype} (want one of {', '.join(map(str, _DTYPES))})")
        if len(self._header("0" * 64, self.geometry.max_positions, "0" * 64, "0" * 64)) != _JSON_BYTES:
            raise ValueError(f"a fingerprint of {len(self.fingerprint)} characters does not fit into the header")

    def key(self, token_ids: Sequence[int]) -> str:
        """Name of the chunk's object: 64 hex digits."""
        return chunk_key(self.fingerprint, token_ids)

    def size(self, tokens: int) -> int:
        """Bytes of the object of a chunk of that many tokens."""
        return HEADER_BYTES + self.geometry.kv_bytes(tokens, self.dtype)

    def encode(self, chunk: ChunkKV) -> list[bytes | memoryview]:
        """The object's bytes: header, keys, values. Views of the chunk's memory where its dtype is the stored one.

        Raises:
            ValueError: wrong shapes, no tokens, or values that are not finite (in the stored dtype).
        """
        shape = self.geometry.kv_shape(len(chunk.token_ids))
        if not chunk.token_ids or chunk.k.shape != shape or chunk.v.shape != shape:
            raise ValueError(
                f"chunk of {len(chunk.token_ids)} tokens has k {list(chunk.k.shape)}, v {list(chunk.v.shape)};"
                f" want {list(shape)} [L, T, H, D]"
            )
        payload = [self._bytes(name, tensor) for name, tensor in (("k", chunk.k), ("v", chunk.v))]
        digest = _sha256(*payload)
        header = self._header(self.key(chunk.token_ids), len(chunk.token_ids), token_digest(chunk.token_ids), digest)
        return [len(header).to_bytes(8, "little") + header, *payload]

    def decode(self, buffer: torch.Tensor, size: int, token_ids: Sequence[int]) -> ChunkKV:
        """Check an object and give its tensors as views of the buffer.

        Args:
            buffer: uint8 `[bytes read]`: the object, or as much of it as `size(len(token_ids))`.
            size: the object's size in bytes.
            token_ids: whose KV it must be.

        Raises:
            ChunkMiss: for anything that is not exactly what `encode` wrote for this chunk.
        """
        tokens = len(token_ids)
        self.check(buffer, size, self.key(token_ids), tokens, token_digest(token_ids))
        k, v = buffer[HEADER_BYTES:].view(self.dtype).view(2, *self.geometry.kv_shape(tokens))
        return ChunkKV(tuple(token_ids), k, v)

    def check(
        self, buffer: torch.Tensor, size: int, key: str, tokens: int | None = None, digest: str | None = None
    ) -> int:
        """Check an object against its name and, where the caller knows them, its tokens.

        Args:
            buffer: uint8 `[bytes read]`.
            size: the object's size in bytes.
            key: its name.
            tokens: how many tokens it must hold; None believes the header.
            digest: their `token_digest`; None believes the header.

        Returns:
            Its number of tokens.

        Raises:
            ChunkMiss: it is not what `encode` wrote.
        """
        raw = memoryview(buffer.numpy())

        def require(holds: bool, reason: MissReason, detail: str) -> None:
            if not holds:
                raise ChunkMiss(reason, key, detail)

        require(len(raw) >= HEADER_BYTES, MissReason.truncated, f"{size} bytes, no whole header")
        header = _parse(bytes(raw[:HEADER_BYTES]))
        require(header is not None, MissReason.header, "the header cannot be read")
        meta, version = header["__metadata__"], str(FORMAT_VERSION)
        found = meta["format_version"]
        require(found == version, MissReason.format_version, f"format version {found!a}, this program has {version}")
        require(
            meta["fingerprint"] == self.fingerprint,
            MissReason.foreign_target,
            f"target {meta['fingerprint'][:64]!a}, wanted {self.fingerprint}",
        )
        count = int(meta["tokens"]) if meta["tokens"].isdecimal() else -1
        same_tokens = tokens in (None, count) and digest in (None, meta["token_digest"])
        require(
            meta["key"] == key and same_tokens,
            MissReason.wrong_tokens,
            f"it holds chunk {meta['key'][:64]!a} of {count} tokens",
        )
        expected = self._header(key, count, meta["token_digest"], meta["payload_sha256"])
        wanted = json.loads(expected)
        for name in ("k", "v"):
            same = header[name] == wanted[name]
            require(same, MissReason.wrong_shape, f"{name} is {header[name]}, wanted {wanted[name]}")
        # What is left to differ is spelling: other spaces, another order of keys, keys twice or too many.
        require(raw[8:HEADER_BYTES] == expected, MissReason.header, "the header is not spelled as we write it")
        require(size >= self.size(count), MissReason.truncated, f"{size} bytes of {self.size(count)}")
        require(size == self.size(count), MissReason.corrupt, f"{size} bytes, {size - self.size(count)} too many")
        require(len(raw) == size, MissReason.truncated, f"{len(raw)} bytes could be read of {size}")
        intact = _sha256(raw[HEADER_BYTES:]) == meta["payload_sha256"]
        require(intact, MissReason.corrupt, "the payload's SHA-256 is not the header's")
        return count

    def _header(self, key: str, tokens: int, digest: str, payload_sha256: str) -> bytes:
        half = self.geometry.kv_bytes(tokens, self.dtype) // 2
        tensor = {"dtype": _DTYPES[self.dtype], "shape": list(self.geometry.kv_shape(tokens))}
        header = {
            "__metadata__": {
                "format_version": str(FORMAT_VERSION),
                "fingerprint": self.fingerprint,
                "key": key,
                "tokens": str(tokens),
                "token_digest": digest,
                "payload_sha256": payload_sha256,
            },
            "k": {**tensor, "data_offsets": [0, half]},
            "v": {**tensor, "data_offsets": [half, 2 * half]},
        }
        return json.dumps(header, separators=(",", ":")).encode().ljust(_JSON_BYTES)

    def _bytes(self, name: str, tensor: torch.Tensor) -> memoryview:
        tensor = tensor.detach().to(device="cpu", dtype=self.dtype).contiguous()
        low, high = torch.aminmax(tensor)  # passes NaN on; one pass, where isfinite().all() takes ten times as long
        if not (low.isfinite() and high.isfinite()):
            raise ValueError(
                f"{name} is not finite as {self.dtype}: nothing stored (store.dtype bfloat16 has the range)"
            )
        return memoryview(tensor.view(torch.uint8).view(-1).numpy())


def claimed(head: torch.Tensor) -> tuple[int, str] | None:
    """Token count and dtype that an object's first `HEADER_BYTES` claim; None when they are not a header of ours."""
    header = _parse(memoryview(head.numpy()).tobytes())
    if header is None or not header["__metadata__"]["tokens"].isdecimal():
        return None
    names = {short: str(dtype).removeprefix("torch.") for dtype, short in _DTYPES.items()}
    dtype = names.get(str(header["k"].get("dtype")))
    return (int(header["__metadata__"]["tokens"]), dtype) if dtype else None


def _parse(head: bytes) -> dict[str, Any] | None:
    """The header as nested dictionaries with every field we write present and of its type; None when it is not."""
    if len(head) != HEADER_BYTES or int.from_bytes(head[:8], "little") != _JSON_BYTES:
        return None
    try:
        header = json.loads(head[8:])
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or not all(isinstance(header.get(k), dict) for k in ("__metadata__", "k", "v")):
        return None
    meta = header["__metadata__"]
    fields = ("format_version", "fingerprint", "key", "tokens", "token_digest", "payload_sha256")
    return header if all(isinstance(meta.get(field), str) for field in fields) else None


def _sha256(*parts: memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
