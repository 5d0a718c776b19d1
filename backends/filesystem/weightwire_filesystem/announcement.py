"""What a sender's rank tells the others through the offer."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from weightwire.errors import TransferError
from weightwire_filesystem.layout import MAX_FILES_PER_RANK

__all__ = ["Announcement"]


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trainer rank's blob.

    Attributes:
        directory: where it writes, as it sees it: for messages only, never opened.
        files_per_rank: its option.
    """

    directory: Annotated[str, Meta(max_length=4096)]
    files_per_rank: Annotated[int, Meta(ge=1, le=MAX_FILES_PER_RANK)]

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, blob: bytes, sender: str) -> Announcement:
        """Parse what ``sender`` announced.

        Raises:
            TransferError: malformed.
        """
        try:
            return msgspec.json.decode(blob, type=cls)
        except msgspec.DecodeError as error:
            raise TransferError(
                f"{sender} announced what can't be read: run one weightwire version on both "
                f"sides\n{error}"
            ) from error
