# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a corpus. One message each, so that they travel between Ray processes whole."""


class UnknownCorpusError(LookupError):
    """There is no such corpus; the message names those there are."""


class UnknownChunkError(LookupError):
    """Chunk ids that the served generation does not hold; the message names them and shows some it does hold."""


class CorpusIntegrityError(ValueError):
    """A file of a generation is missing or not what was written; the message names the file."""


class CorpusMismatchError(ValueError):
    """The corpus belongs to another tokenizer or embedding model than the settings; the message names both."""


class CorpusConflictError(RuntimeError):
    """Another writer published a generation while this one was being made; nothing was published."""
