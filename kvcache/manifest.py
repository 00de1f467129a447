# SPDX-License-Identifier: Apache-2.0
"""`target.json`, the file at a store's root that says whose store it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvcache.chunk import FORMAT_VERSION

MANIFEST = "target.json"
MANIFEST_BYTES = 65_536
"""More than any manifest has; a reader asks for no more."""


class StoreMismatchError(Exception):
    """The store belongs to another target, or was written in another way; the message names both."""


@dataclass(frozen=True)
class StoreManifest:
    """Whose store it is.

    Attributes:
        fingerprint: the target's, lower-case hex.
        model: the target's name, for people.
        dtype: of the stored keys and values, such as "float16".
        format_version: of the chunk-cache objects.
    """

    fingerprint: str
    model: str
    dtype: str
    format_version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """The file's bytes."""
        return json.dumps(asdict(self), indent=2).encode()

    def check(self, data: bytes, uri: str) -> None:
        """Compare a store's manifest with this program's.

        Args:
            data: the file's bytes.
            uri: the store's location, for the message.

        Raises:
            StoreMismatchError: another fingerprint, dtype or format version, or no manifest at all.
        """
        ours = asdict(self)
        try:
            decoded = json.loads(data)
            found = {name: decoded[name] for name in ours}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreMismatchError(
                f"{MANIFEST} in {uri} is damaged and does not say whose store this is. If it is that of target"
                f" {self.model!r}, fingerprint {self.fingerprint}, delete that one file; else use another store.uri"
            ) from error
        if found["fingerprint"] != self.fingerprint:
            raise StoreMismatchError(
                f"the chunk cache in {uri} belongs to target {found['model']!r}, fingerprint {found['fingerprint']};"
                f" this program has target {self.model!r}, fingerprint {self.fingerprint}. Set target.model, revision"
                " and dtype to the store's, or give this target a store.uri of its own"
            )
        for name in ("format_version", "dtype"):
            if found[name] != ours[name]:
                raise StoreMismatchError(
                    f"the chunk cache in {uri} (target {found['model']!r}, fingerprint {found['fingerprint']}, the same"
                    f" as here) has {name} {found[name]}, this program has {ours[name]}."
                    " Set store.dtype to the store's, or use another store.uri and precompute again"
                )
