# SPDX-License-Identifier: Apache-2.0
"""Shared memory for hand-offs in flight on one node.

A maker (repair actor) owns one arena: an anonymous memory file (`memfd`), mapped once by the maker and once by each
reader, which opens it through `/proc/<maker>/fd`. The kernel frees it when the last process that maps it is gone, so
a maker killed with SIGKILL leaks nothing. Pages are touched once and then reused: a hand-off costs no page faults and
no system calls in the steady state, only the maker's write and the reader's read of the KV itself.

A table of slots in front of the data says who may use what. The maker reclaims a slot when it is marked done, or when
its lease has run out. A reader checks the slot before it reads and again after (`confirm`): the maker takes the
slot's id away before it reuses the memory, so a reader that was overtaken knows.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import uuid
from dataclasses import dataclass

import numpy as np

_MAGIC = b"cachemend-arena1"
_SLOTS = 1024
_PAGE = mmap.PAGESIZE
_TABLE_OFFSET = 64
_SLOT_DTYPE = np.dtype([("id", "S16"), ("state", "<u4"), ("pad", "<u4"), ("deadline", "<f8")])
_DATA_OFFSET = -(-(_TABLE_OFFSET + _SLOTS * _SLOT_DTYPE.itemsize) // _PAGE) * _PAGE
_FREE, _WRITING, _READY, _DONE = range(4)


class ArenaFullError(MemoryError):
    """No room (or no slot) for a hand-off now; some will come back as engines load theirs."""


class LeaseError(RuntimeError):
    """The hand-off is no longer there: loaded before, released, its lease over, or its maker gone."""


@dataclass(frozen=True)
class ArenaAddress:
    """Where a block lies; plain values that travel in a request."""

    pid: int
    fd: int
    nonce: str
    slot: int
    slot_id: str
    offset: int
    nbytes: int


@dataclass
class Block:
    """A reserved piece of the maker's arena."""

    address: ArenaAddress
    memory: memoryview


class Arena:
    """The maker's side. Thread-safe.

    Args:
        nbytes: room for hand-offs, in bytes.
        lease_s: seconds after `publish` at which an unread block may be taken back.
    """

    def __init__(self, nbytes: int, lease_s: float) -> None:
        self.capacity = -(-nbytes // _PAGE) * _PAGE
        self._lease_s = lease_s
        self._fd = os.memfd_create("cachemend-handoff", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _DATA_OFFSET + self.capacity)
        self._map = mmap.mmap(self._fd, _DATA_OFFSET + self.capacity)
        self._view = memoryview(self._map)
        self._nonce = uuid.uuid4().hex
        self._view[:16] = _MAGIC
        self._view[16:48] = self._nonce.encode()
        self._table = _table(self._map)
        self._lock = threading.Lock()
        self._free = [(0, self.capacity)]  # extents (offset, size), by offset, never adjacent
        self._live: dict[int, tuple[int, int]] = {}  # slot -> extent
        self._next_slot = 0

    def reserve(self, nbytes: int) -> Block:
        """Take a block to write into.

        Raises:
            ArenaFullError: no room now.
            ValueError: larger than the whole arena.
        """
        size = max(1, -(-nbytes // _PAGE)) * _PAGE
        if size > self.capacity:
            raise ValueError(f"a hand-off of {nbytes} bytes does not fit an arena of {self.capacity} bytes")
        with self._lock:
            self._sweep()
            slot = self._take_slot()
            offset = self._take(size)  # last: what it takes is only given back by way of a live slot
            self._live[slot] = (offset, size)
            slot_id = os.urandom(8).hex()
            self._table[slot] = (slot_id.encode(), _WRITING, 0, 0.0)
        start = _DATA_OFFSET + offset
        address = ArenaAddress(os.getpid(), self._fd, self._nonce, slot, slot_id, start, nbytes)
        return Block(address, self._view[start : start + nbytes])

    def publish(self, block: Block) -> ArenaAddress:
        """Make a written block readable; its lease starts."""
        entry = self._table[block.address.slot : block.address.slot + 1]
        entry["deadline"] = time.monotonic() + self._lease_s
        entry["state"] = _READY
        return block.address

    def abandon(self, block: Block) -> None:
        """Give a reserved or published block back."""
        _mark_done(self._table, block.address)

    def stats(self) -> dict[str, int]:
        """Live hand-offs and their bytes, after taking back what is done."""
        with self._lock:
            self._sweep()
            return {"live": len(self._live), "live_bytes": sum(size for _, size in self._live.values())}

    def close(self) -> None:
        """Refuse new readers; the memory goes when the last mapping does."""
        os.close(self._fd)

    def check_integrity(self) -> None:
        """Assert that free and live extents tile the arena."""
        with self._lock:
            extents = sorted([*self._free, *self._live.values()])
            end = 0
            for offset, size in extents:
                assert offset == end, f"hole or overlap at byte {end}"
                end = offset + size
            assert end == self.capacity, f"extents end at {end}, not {self.capacity}"

    def _sweep(self) -> None:
        now = time.monotonic()
        for slot in list(self._live):
            state, deadline = int(self._table[slot]["state"]), float(self._table[slot]["deadline"])
            if state == _DONE or (state == _READY and now > deadline):
                self._table[slot] = (b"", _FREE, 0, 0.0)
                self._give(*self._live.pop(slot))

    def _take(self, size: int) -> int:
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                rest = [(offset + size, room - size)] if room > size else []
                self._free[index : index + 1] = rest
                return offset
        raise ArenaFullError(f"no {size} contiguous bytes free in an arena of {self.capacity}")

    def _take_slot(self) -> int:
        # Round robin: a late `release` of an old hand-off should not meet a new one in the same slot.
        for step in range(_SLOTS):
            slot = (self._next_slot + step) % _SLOTS
            if slot not in self._live:
                self._next_slot = slot + 1
                return slot
        raise ArenaFullError(f"all {_SLOTS} hand-off slots are in use")

    def _give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged


class ArenaReader:
    """The reader's side: maps makers' arenas on first sight and drops those of makers that are gone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}  # nonce -> (maker's pid, mapping)

    def open(self, address: ArenaAddress) -> memoryview:
        """The block's bytes, read in place.

        Raises:
            LeaseError: the hand-off is not there (any more).
        """
        mapping = self._attach(address)
        if not _holds(_table(mapping), address):
            raise LeaseError(f"hand-off {address.slot_id} is no longer held for this request")
        if address.offset < _DATA_OFFSET or address.offset + address.nbytes > len(mapping) or address.nbytes < 0:
            raise LeaseError(f"hand-off {address.slot_id} points outside its arena")
        return memoryview(mapping)[address.offset : address.offset + address.nbytes]

    def confirm(self, address: ArenaAddress) -> None:
        """After reading: what was read was the hand-off, whole. `release` then gives the block back.

        Raises:
            LeaseError: the maker took the block back meanwhile; drop what was read.
        """
        if not _holds(_table(self._attach(address)), address):
            raise LeaseError(f"hand-off {address.slot_id} was taken back while it was read")

    def release(self, address: ArenaAddress) -> None:
        """Give a block back, read or not; nothing happens when it, or its maker, is gone."""
        try:
            _mark_done(_table(self._attach(address)), address)
        except LeaseError:
            return

    def _attach(self, address: ArenaAddress) -> mmap.mmap:
        with self._lock:
            if address.nonce in self._maps:
                return self._maps[address.nonce][1]
            self._maps = {n: (pid, m) for n, (pid, m) in self._maps.items() if os.path.exists(f"/proc/{pid}")}
            try:
                fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise LeaseError(f"the maker of hand-off {address.slot_id} is gone ({error.strerror})") from None
            try:
                mapping = mmap.mmap(fd, 0)
            except (OSError, ValueError) as error:
                raise LeaseError(f"hand-off {address.slot_id} cannot be mapped ({error})") from None
            finally:
                os.close(fd)
            if len(mapping) < _DATA_OFFSET or mapping[:16] != _MAGIC or mapping[16:48] != address.nonce.encode():
                raise LeaseError(f"process {address.pid} is not the maker of hand-off {address.slot_id}")
            self._maps[address.nonce] = (address.pid, mapping)
            return mapping


def _table(mapping: mmap.mmap) -> np.ndarray:
    return np.frombuffer(mapping, dtype=_SLOT_DTYPE, count=_SLOTS, offset=_TABLE_OFFSET)


def _holds(table: np.ndarray, address: ArenaAddress) -> bool:
    if not 0 <= address.slot < _SLOTS:
        return False
    entry = table[address.slot]
    return bytes(entry["id"]) == address.slot_id.encode() and int(entry["state"]) == _READY


def _mark_done(table: np.ndarray, address: ArenaAddress) -> None:
    if 0 <= address.slot < _SLOTS and bytes(table[address.slot]["id"]) == address.slot_id.encode():
        table[address.slot : address.slot + 1]["state"] = _DONE
