# SPDX-License-Identifier: Apache-2.0
"""Files at any location `pyarrow.fs` opens: a local path, s3://, gs://, hdfs://."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from pyarrow import fs


def resolve(location: str) -> tuple[fs.FileSystem, str]:
    """Split a location into its file system and the path in it; a location without a scheme is a local path.

    Raises:
        ValueError: a scheme that pyarrow does not know, or a malformed URI.
    """
    if "://" in location:
        return fs.FileSystem.from_uri(location)
    return fs.LocalFileSystem(), str(Path(location).expanduser().absolute())


def read_bytes(filesystem: fs.FileSystem, path: str) -> bytes:
    """A file's whole content.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the read failed.
    """
    with filesystem.open_input_file(path) as file:
        return file.read()


def write_whole(filesystem: fs.FileSystem, path: str, data: bytes | memoryview) -> None:
    """Write a file that becomes visible only when whole, replacing the one before it in one step.

    Object stores show an object when its upload completes. A local file is written beside its place and renamed; when
    the process dies in between, a file whose name starts with a dot is left, which no reader looks at.
    """
    if not isinstance(filesystem, fs.LocalFileSystem):
        with filesystem.open_output_stream(path) as file:
            file.write(data)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        partial.write_bytes(data)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
