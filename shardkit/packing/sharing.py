"""Pictures whose whole blocks a shard shares with their source, instead of a copy: `--reflink`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import CapabilityError, ConfigError, ShardkitError, ShortReadError
from shardkit.extent import align_up
from shardkit.format.tar import BLOCK
from shardkit.packing.source import judged
from shardkit.storage.atomic import os_errors
from shardkit.storage.clone import Place, block_bytes, can_share, plan_blocks

if TYPE_CHECKING:
    import mmap

    from shardkit.packing.options import ShardOptions
    from shardkit.packing.supply import Supply
    from shardkit.storage.clone import Reflink
    from shardkit.storage.sequential_writer import SequentialWriter

__all__ = ["Room", "decide"]


def decide(reflink: Reflink, options: ShardOptions, supply: Supply, folder: bytes) -> Reflink:
    """Return what the workers are told: `never` where nothing can be shared.

    Args:
        reflink: what is wished.
        options: of the shards.
        supply: has the sources.
        folder: that the shards are written to.

    Raises:
        ConfigError: `always`, with options by which no image has blocks to share.
        CapabilityError: `always`, and the file system does not share blocks, or not between source and target.
        StorageError: `always`, and the system failed to try.
    """
    if reflink == "never":
        return reflink
    with os_errors("cannot look at the target", folder):
        block = block_bytes(folder)
    if options.resize is not None or options.align % block:
        if reflink == "always":
            why = f"--align {options.align}, and blocks of {block} bytes"
            why = why if options.resize is None else "--resize, which makes new images"
            raise ConfigError("these shards could share no blocks with their sources", found=why,
                              remedy="leave --reflink always away, or change that")  # fmt: skip
        return "never"
    file = supply.a_file(block)
    if file is None:
        return "always" if reflink == "always" else "never"
    return reflink if can_share(reflink, file, folder) else "never"


class Room:
    """Where a picture goes: in the writer's buffer after its headers, and so in the shard."""

    def __init__(self, writer: SequentialWriter, head: int, reflink: Reflink) -> None:
        """Take the bytes of what stands before the payload."""
        self._writer, self._head, self._reflink = writer, head, reflink
        self.shared = 0
        """Bytes from the payload's start on that the shard has already."""

    @property
    def buffer(self) -> mmap.mmap:
        """Where the payload lies."""
        return self._writer.buffer

    @property
    def start(self) -> int:
        """Where in the buffer it begins."""
        return self._writer.position + self._head

    def __call__(self, wanted: int) -> tuple[mmap.mmap, int]:
        """Make room for a payload; return the buffer, and where in it the payload goes. Nothing is shared then."""
        self.shared = 0
        # One byte more than the payload: the read uses it to notice that a file has grown.
        self._writer.reserve(self._head + align_up(wanted + 1, BLOCK))
        return self._writer.buffer, self._writer.position + self._head

    def share(self, source: Place, size: int) -> int:
        """Let the shard share the whole blocks of a payload, and read them back from the shard to their room.

        Reading them where they are stored makes what is checked and what is stored the same bytes, whoever writes into
        the source meanwhile.

        Args:
            source: where the payload begins in an open file.
            size: bytes of the payload.

        Returns:
            How many bytes of the payload lie in the buffer, from its start on; the rest is to be read from the source.

        Raises:
            RefusedError: the blocks cannot be read.
            CapabilityError: they cannot be shared, with `--reflink always`.
            ShardkitError: the target failed.
        """
        if self._reflink == "never" or size < self._writer.block_bytes:
            return 0
        writer = self._writer
        plan = plan_blocks(source.offset, writer.offset + self._head, size, writer.block_bytes)
        try:
            if plan.head:
                raise CapabilityError("an image that does not start where a block does shares none", path=source.path,
                                      offset=source.offset, expected=f"a multiple of {writer.block_bytes}",
                                      remedy="leave --reflink always away")  # fmt: skip
            writer.share(source, self._head, plan.shared)
        except ShortReadError:  # it has become shorter: whoever reads the rest notices
            return 0
        except CapabilityError:
            if self._reflink == "always":
                raise
            return 0
        except ShardkitError:
            raise
        except OSError as error:
            raise judged(error, source.path, source.offset) from error
        self.shared = plan.shared
        return plan.shared
