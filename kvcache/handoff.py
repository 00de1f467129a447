# SPDX-License-Identifier: Apache-2.0
"""The hand-off: how a repaired prefix travels from a repair actor to an engine's worker.

The maker writes global KV into memory that a `Transport` gives it and gets back a *ticket*, a plain dict that rides in
the request (`kv_transfer_params`). Two transports: shared memory on one node (the maker's write is the only copy; the
worker reads in place), and Ray's object transport across nodes. The engine turns any ticket into a local one with
`localise`, and its worker reads local tickets with `HandoffReader`.

A hand-off is freed when the worker has loaded it, when the request ends in any other way (`release`), when its lease
runs out, and when its maker dies.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvcache.arena import Arena, ArenaAddress, ArenaFullError, ArenaReader, LeaseError
from kvcache.geometry import Geometry

_RETRY_S = 0.005


class HandoffError(ValueError):
    """A hand-off that cannot be made, or a ticket that must not be loaded: malformed, of another target, of other
    tokens, or of other shapes."""


@dataclass(frozen=True)
class HandoffIdentity:
    """What the engine checks before a byte reaches the paged cache.

    Attributes:
        request_id: the request it was made for.
        rows: KV rows, `T`.
        token_digest: `kvcache.chunk.token_digest` of the ids that stand for the rows.
        fingerprint: of the target.
        shape: `[L, T, H, D]` of keys and of values.
        dtype: name of the dtype, e.g. "float32".
    """

    request_id: str
    rows: int
    token_digest: str
    fingerprint: str
    shape: tuple[int, int, int, int]
    dtype: str


class HandoffWriter:
    """Memory to write a prefix's global KV into, then `commit` or `abandon` (once).

    Attributes:
        k: keys at their global positions, `[L, T, H, D]`, to be written.
        v: values, likewise.
    """

    def __init__(
        self, memory: torch.Tensor, shape: tuple[int, int, int, int], commit: Callable[[], dict], abandon: Callable
    ) -> None:
        self.k, self.v = memory.view(2, *shape)
        self.commit = commit
        self.abandon = abandon


class Transport(Protocol):
    """Gives out memory for hand-offs."""

    def reserve(self, identity: HandoffIdentity) -> HandoffWriter:
        """Raises `kvcache.arena.ArenaFullError` when there is no room now, ValueError when there never will be."""
        ...


class SharedMemoryTransport:
    """Both sides on one node. Copies: none besides the maker's write of the KV and the worker's load."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def reserve(self, identity: HandoffIdentity) -> HandoffWriter:
        dtype = getattr(torch, identity.dtype)
        nbytes = 2 * torch.Size(identity.shape).numel() * dtype.itemsize
        if not nbytes:
            raise ValueError("a prefix without rows needs no hand-off")
        block = self._arena.reserve(nbytes)

        def commit() -> dict[str, Any]:
            address = asdict(self._arena.publish(block))
            return {"kind": "shared_memory", "node": node_id(), "identity": asdict(identity), "address": address}

        memory = torch.frombuffer(block.memory, dtype=dtype)
        return HandoffWriter(memory, identity.shape, commit, lambda: self._arena.abandon(block))


class RayTransport:
    """Across nodes. Ray owns the bytes: one copy into its object store, one over the network when it must, and one
    into an arena on the engine's node, because vLLM's worker is not a Ray process."""

    def reserve(self, identity: HandoffIdentity) -> HandoffWriter:
        import ray

        memory = torch.empty(2, *identity.shape, dtype=getattr(torch, identity.dtype))

        def commit() -> dict[str, Any]:
            reference = ray.put(memory.view(torch.uint8).numpy())
            return {"kind": "ray", "identity": asdict(identity), "object": reference}

        return HandoffWriter(memory, identity.shape, commit, lambda: None)


async def reserve(transport: Transport, identity: HandoffIdentity, wait_s: float) -> HandoffWriter:
    """Memory for a hand-off, as soon as there is room.

    Args:
        transport: gives it.
        identity: of the hand-off.
        wait_s: longest wait, in seconds.

    Raises:
        ArenaFullError: no room until then.
        HandoffError: there never will be.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return transport.reserve(identity)
        except ValueError as error:
            raise HandoffError(str(error)) from None
        except ArenaFullError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_RETRY_S)


async def localise(ticket: dict[str, Any], transport: SharedMemoryTransport, wait_s: float) -> dict[str, Any]:
    """A ticket that a worker on this node can read; the same one when it already can.

    Args:
        ticket: from a maker anywhere.
        transport: this node's memory.
        wait_s: seconds to wait for room in it.

    Raises:
        LeaseError: its maker is gone, or on another node without Ray's transport.
        ArenaFullError: no room on this node in time.
        HandoffError: not a ticket, or larger than this node's arena.
    """
    if ticket.get("kind") == "shared_memory":
        if ticket.get("node") != node_id():
            raise LeaseError("the hand-off lies in another node's memory: set handoff.transport to ray")
        return ticket
    if ticket.get("kind") != "ray":
        raise HandoffError(f"a hand-off of kind {ticket.get('kind')!r}")
    from ray.exceptions import RayError

    try:
        data = await ticket["object"]
    except RayError as error:
        raise LeaseError(f"Ray lost the hand-off: {error}") from None
    writer = await reserve(transport, HandoffIdentity(**ticket["identity"]), wait_s)
    copying = asyncio.ensure_future(asyncio.to_thread(_copy, data, writer))
    try:
        await asyncio.shield(copying)
    except BaseException:
        # Cancelled meanwhile: the memory may be given back only when nobody writes into it any more.
        copying.add_done_callback(lambda _: writer.abandon())
        raise
    return writer.commit()


def _copy(data: np.ndarray, writer: HandoffWriter) -> None:
    # As bytes: Ray's arrays are read-only, and numpy knows no bfloat16.
    for part, source in zip((writer.k, writer.v), data.reshape(2, -1), strict=True):
        np.copyto(part.view(torch.uint8).numpy().reshape(-1), source)


class HandoffReader:
    """The engine's side of shared memory.

    Args:
        fingerprint: of the engine's target.
        geometry: its shapes.
        dtype: of its paged cache.
    """

    def __init__(self, fingerprint: str, geometry: Geometry, dtype: torch.dtype) -> None:
        self._fingerprint = fingerprint
        self._geometry = geometry
        self._dtype = dtype
        self._reader = ArenaReader()

    def identify(self, ticket: Any) -> HandoffIdentity:
        """Check a ticket's form, target and shapes, without touching its memory.

        Raises:
            HandoffError: it must not be loaded; the message says why.
        """
        try:
            identity = HandoffIdentity(**{**ticket["identity"], "shape": tuple(ticket["identity"]["shape"])})
            address = ArenaAddress(**ticket["address"])
            kind = ticket["kind"]
        except (KeyError, TypeError) as error:
            raise HandoffError(f"malformed hand-off ticket ({error!r})") from None
        if kind != "shared_memory":
            raise HandoffError(f"a worker cannot load a {kind!r} hand-off")
        if f"torch.{identity.dtype}" != str(self._dtype):
            raise HandoffError(f"hand-off of {identity.dtype}, engine of {self._dtype}")
        if identity.fingerprint != self._fingerprint:
            raise HandoffError(f"hand-off of target {identity.fingerprint[:12]}, engine of {self._fingerprint[:12]}")
        if identity.rows < 0 or identity.shape != self._geometry.kv_shape(identity.rows):
            raise HandoffError(f"hand-off shape {identity.shape}, want {self._geometry.kv_shape(identity.rows)}")
        if address.nbytes != self._geometry.kv_bytes(identity.rows, self._dtype):
            raise HandoffError(f"hand-off of {address.nbytes} bytes for {identity.rows} rows of {identity.dtype}")
        return identity

    def open(self, ticket: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[L, T, H, D]`, read in place; call `confirm` when done, then `release`.

        Raises:
            HandoffError, LeaseError: do not load it.
        """
        identity = self.identify(ticket)
        memory = self._reader.open(ArenaAddress(**ticket["address"]))
        k, v = torch.frombuffer(memory, dtype=self._dtype).view(2, *identity.shape)
        return k, v

    def confirm(self, ticket: dict[str, Any]) -> None:
        """What was read was the hand-off, whole. Raises LeaseError when it was taken back meanwhile."""
        self._reader.confirm(ArenaAddress(**ticket["address"]))

    def release(self, ticket: dict[str, Any]) -> None:
        """Every rank has loaded it: free it. Never raises."""
        self._reader.release(ArenaAddress(**ticket["address"]))


_RELEASER = ArenaReader()


def release(ticket: dict[str, Any] | None) -> None:
    """End a hand-off whose request ended before the engine loaded it. Never raises; elsewhere its lease ends it."""
    if ticket and ticket.get("kind") == "shared_memory" and ticket.get("node") == node_id():
        _RELEASER.release(ArenaAddress(**ticket["address"]))


def node_id() -> str:
    """Names the machine and process namespace within which shared memory works."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
