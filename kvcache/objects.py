# SPDX-License-Identifier: Apache-2.0
"""Whole objects in any location `pyarrow.fs` opens: read, written and listed with retries.

A write is visible only when whole. On object stores (S3, GCS, Azure) a put is atomic; elsewhere the bytes go to a
temporary file in the same folder, which is renamed. Temporary files that a killed writer left are never read, and
`sweep` removes them. A writer killed within an S3 multipart upload (objects above 10 MiB) leaves parts that nobody
sees but somebody pays for: give the bucket a lifecycle rule that aborts incomplete uploads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from pyarrow import fs as pafs
from tenacity import Retrying, before_sleep_log, retry_if_exception, stop_after_attempt, wait_exponential_jitter

logger = logging.getLogger(__name__)

STORAGE_ERRORS = (OSError, pa.ArrowException)
"""What an operation on a file system may raise."""

Buffer = bytes | memoryview
_LONGEST_PAUSE_S = 10.0
_TEMP_SUFFIX = ".tmp"

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_PERMANENT = _FULL | _DENIED | _WRONG_PATH
_REDIRECT = re.compile(r"HTTP status 30[0-9]|configured region")
_REFUSED = re.compile(r"ACCESS_DENIED|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|SIGNATURE|HTTP status 40[13]")
_PERMANENT_HTTP = re.compile(rf"NO_SUCH_BUCKET|HTTP status 4(?!08|29)[0-9]{{2}}|{_REDIRECT.pattern}|{_REFUSED.pattern}")
_BUSY = re.compile(r"SLOW_DOWN|SERVICE_UNAVAILABLE|THROTTLING|HTTP status (429|503)")
_TIMEOUT = re.compile(r"curlCode: 28|time-?d?[ -]?out|REQUEST_TIMEOUT", re.IGNORECASE)
_HINT_BUCKET = "check the bucket's name and endpoint in the URI, or create it first"


class StoreError(OSError):
    """A location cannot be used; the message names the location, the cause and what to do about it."""


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a listing shows it: path below the root, size in bytes, age in seconds."""

    path: str
    size: int
    age_s: float


class ObjectStore:
    """Objects below one root. Thread-safe.

    Args:
        uri: a local path (relative or absolute), or a URI that `pyarrow.fs` opens. S3 settings come in the query
            (`s3://bucket/prefix?region=eu-west-1&endpoint_override=host:9000&scheme=http`) or from the standard
            environment.
        attempts: tries of one operation before its error is raised.
        retry_base_s: first pause between tries, in seconds; it doubles, with jitter.

    Raises:
        StoreError: the location is not one that `pyarrow.fs` opens.
    """

    def __init__(self, uri: str, *, attempts: int, retry_base_s: float) -> None:
        self.uri = _shown(uri)
        self._fs, self._root = _open(uri)
        self._local = isinstance(self._fs, pafs.LocalFileSystem)
        self._atomic_put = self._fs.type_name in {"s3", "gcs", "abfs"}
        self._retry = Retrying(
            stop=stop_after_attempt(attempts),
            wait=wait_exponential_jitter(multiplier=retry_base_s, max=_LONGEST_PAUSE_S, jitter=retry_base_s),
            retry=retry_if_exception(is_transient),
            before_sleep=before_sleep_log(logger, logging.INFO),
            reraise=True,
        )

    def read(self, path: str, at_most: int) -> tuple[torch.Tensor, int]:
        """Read the first `at_most` bytes of an object, straight into the memory that is returned.

        Returns:
            uint8 `[bytes read]`, and the object's size in bytes.

        Raises:
            FileNotFoundError: no such object.
            OSError, pyarrow.ArrowException: it could not be read, after retries.
        """
        return self._retry(self._read, self._full(path), at_most)

    def write(self, path: str, parts: Sequence[Buffer]) -> int:
        """Write an object that consists of `parts`, one after the other; it replaces one of the same name.

        Returns:
            Bytes written.

        Raises:
            StoreError: it could not be written (full, not permitted, unreachable); nothing is visible.
        """
        with self._explained("write", path):
            return self._retry(self._write, self._full(path), parts)

    def delete(self, path: str) -> None:
        """Delete an object; it is no error when there is none."""
        with self._explained("delete", path), contextlib.suppress(FileNotFoundError):
            self._retry(self._fs.delete_file, self._full(path))

    def delete_folder(self, path: str) -> None:
        """Delete a folder and everything below it; it is no error when there is none."""
        with self._explained("delete", path), contextlib.suppress(FileNotFoundError):
            self._retry(self._fs.delete_dir, self._full(path))

    def size(self, path: str) -> int | None:
        """Size of an object in bytes; None when there is none."""
        with self._explained("look up", path):
            info = self._retry(self._fs.get_file_info, self._full(path))
        return info.size if info.type == pafs.FileType.File else None

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        """Objects below a folder, one subfolder at a time; temporary files are left out."""
        return (info for info in self._walk(folder) if not info.path.endswith(_TEMP_SUFFIX))

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder, from one listing that goes no deeper."""
        selector = pafs.FileSelector(self._full(folder), allow_not_found=True)
        with self._explained("list", folder):
            found = self._retry(self._fs.get_file_info, selector)
        return [info.base_name for info in found if info.type == pafs.FileType.Directory]

    def sweep(self, folder: str, older_than_s: float) -> int:
        """Remove temporary files that no writer can be busy with any more, and say how many."""
        if self._atomic_put:
            return 0
        stale = [i for i in self._walk(folder) if i.path.endswith(_TEMP_SUFFIX) and i.age_s > older_than_s]
        for info in stale:
            self.delete(info.path)
        return len(stale)

    def check_bucket(self) -> None:
        """Check that the bucket exists; on object stores a missing bucket reads like a missing object.

        Raises:
            StoreError: it does not exist, or cannot be reached.
        """
        if self._atomic_put:
            bucket = self._root.split("/")[0]
            with self._explained("look up", "the bucket"):
                info = self._retry(self._fs.get_file_info, bucket)
            if info.type == pafs.FileType.NotFound:
                raise StoreError(f"{self.uri}: bucket {bucket!r} does not exist: {_HINT_BUCKET}")

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _read(self, path: str, at_most: int) -> tuple[torch.Tensor, int]:
        with open(path, "rb", buffering=0) if self._local else self._fs.open_input_file(path) as file:
            size = os.fstat(file.fileno()).st_size if self._local else file.size()
            buffer = torch.empty(min(size, at_most), dtype=torch.uint8)
            view, done = memoryview(buffer.numpy()), 0
            while done < len(view) and (count := file.readinto(view[done:])):
                done += count
        return buffer[:done], size

    def _write(self, path: str, parts: Sequence[Buffer]) -> int:
        if self._atomic_put:
            # One write call, because closing a stream publishes what was written so far, and its destructor closes.
            body = b"".join(parts)
            stream = self._fs.open_output_stream(path)
            stream.write(body)
            stream.close()
            return len(body)
        temporary = f"{path}.{uuid.uuid4().hex}{_TEMP_SUFFIX}"
        try:
            if self._local:
                size = _write_local(temporary, parts)
                os.replace(temporary, path)
                _sync_folder(os.path.dirname(path))
            else:
                self._fs.create_dir(path.rpartition("/")[0], recursive=True)
                with self._fs.open_output_stream(temporary) as stream:
                    size = sum(stream.write(part) for part in parts)
                self._fs.move(temporary, path)
        except BaseException:
            with contextlib.suppress(*STORAGE_ERRORS):
                self._fs.delete_file(temporary)
            raise
        return size

    def _walk(self, folder: str) -> Iterator[ObjectInfo]:
        now = time.time()
        folders = [self._full(folder)]
        while folders:
            selector = pafs.FileSelector(folders.pop(), allow_not_found=True)
            with self._explained("list", folder):
                found = self._retry(self._fs.get_file_info, selector)
            for info in found:
                if info.type == pafs.FileType.Directory:
                    folders.append(info.path)
                elif info.type == pafs.FileType.File:
                    age_s = now - info.mtime.timestamp() if info.mtime else 0.0
                    yield ObjectInfo(info.path.removeprefix(f"{self._root}/"), info.size, age_s)

    @contextlib.contextmanager
    def _explained(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except STORAGE_ERRORS as error:
            raise StoreError(f"cannot {verb} {path} in {self.uri}: {explain(error)}") from error


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: 503, SlowDown, 429, time-outs, broken connections, passing I/O errors."""
    if not isinstance(error, OSError) or error.errno in _PERMANENT:
        return False
    return not _PERMANENT_HTTP.search(str(error))


def is_timeout(error: BaseException) -> bool:
    """Whether a storage error is a time-out."""
    return isinstance(error, TimeoutError) or bool(_TIMEOUT.search(str(error)))


def explain(error: BaseException) -> str:
    """A storage error, and what a person can do about it."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    for matches, hint in (
        (number in _FULL, "the disk is full or over quota: free space there, or point store.uri elsewhere"),
        (number in _DENIED, "this user may not do that there: change the permissions, or point store.uri elsewhere"),
        ("NO_SUCH_BUCKET" in text, _HINT_BUCKET),
        (_REDIRECT.search(text), "the bucket is in another region: put region=... into the URI's query"),
        (_REFUSED.search(text), "the store refused the credentials: check AWS_ACCESS_KEY_ID, AWS_PROFILE and policy"),
        (_BUSY.search(text), "the store is overloaded: try later, or raise store.attempts"),
        ("NETWORK_CONNECTION" in text, "the endpoint did not answer: check endpoint_override and scheme in the URI"),
    ):
        if matches:
            return f"{text} ({hint})"
    return text


def _shown(text: str) -> str:
    # Messages and logs must not carry the credentials that a URI may hold.
    return re.sub(r"//[^@/]*@", "//***@", text)


def _open(uri: str) -> tuple[pafs.FileSystem, str]:
    if "://" not in uri:
        return pafs.LocalFileSystem(), str(Path(uri).expanduser().absolute())
    try:
        filesystem, root = pafs.FileSystem.from_uri(uri)
    except (*STORAGE_ERRORS, ValueError) as error:
        # Arrow's own text repeats the URI; `from None`, so that no traceback shows it either.
        raise StoreError(f"cannot open {_shown(uri)}: {_shown(explain(error))}") from None
    if not root.strip("/"):
        raise StoreError(f"cannot open {_shown(uri)}: it names no folder or bucket")
    if isinstance(filesystem, pafs.S3FileSystem):
        # `from_uri` takes no retry strategy, and the SDK's own (10 tries) would multiply with ours. Small objects
        # go out as a single PUT when opening is delayed.
        _, (options,) = filesystem.__reduce__()
        single = pafs.AwsStandardS3RetryStrategy(max_attempts=1)
        filesystem = pafs.S3FileSystem(**{**options, "retry_strategy": single, "allow_delayed_open": True})
    return filesystem, root.rstrip("/")


def _write_local(path: str, parts: Sequence[Buffer]) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sum(map(len, parts))


def _sync_folder(path: str) -> None:
    # Without it a crash of the machine may forget the rename (never half of the object).
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
