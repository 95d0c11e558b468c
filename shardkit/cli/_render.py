"""Everything that the commands print: the only place that does."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from shardkit.errors import StorageError
from shardkit.escaping import escape
from shardkit.sizes import byte_text

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

__all__ = [
    "byte_text",
    "count_text",
    "print_bytes",
    "print_error",
    "print_json",
    "print_lines",
    "quote",
    "share_text",
    "time_text",
    "warn",
]


def share_text(part: float, whole: float) -> str:
    """Return a part as per cent of a whole.

    >>> share_text(1, 8)
    '12.5 %'
    """
    return f"{100 * part / whole if whole else 0:.1f} %"


def time_text(seconds: float, size: float) -> str:
    """Return how long it took, and how fast that was; no rate where next to nothing was read or written.

    >>> time_text(2.0, 3_000_000), time_text(2.0, 0)
    ('in 2.0 s (1.5 MB/s)', 'in 2.0 s')
    """
    rate = byte_text(size / max(seconds, 1e-9))
    return f"in {seconds:.1f} s" if rate == "0 B" else f"in {seconds:.1f} s ({rate}/s)"


def count_text(counts: Counter[str], most: int = 6) -> str:
    """Return counts by kind, the largest first.

    >>> from collections import Counter
    >>> count_text(Counter({"truncated": 2, "empty": 1}))
    '2 truncated, 1 empty'
    """
    shown = [f"{count:,} {kind}" for kind, count in counts.most_common(most)]
    rest = sum(counts.values()) - sum(count for _, count in counts.most_common(most))
    return ", ".join([*shown, f"{rest:,} others"] if rest else shown)


def quote(path: str) -> str:
    r"""Return a path as a shell takes it and a terminal does not obey it.

    >>> quote("a b"), quote("a\x1b'b")
    ("'a b'", "$'a\\x1b\\'b'")
    """
    shown = escape(path)
    return shlex.quote(path) if shown == path else "$'" + shown.replace("'", "\\'") + "'"


def print_lines(lines: Sequence[str]) -> None:
    """Print lines to standard output."""
    _print("\n".join(lines))


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document to standard output."""
    _print(json.dumps(document, indent=1))


def print_bytes(data: bytes) -> None:
    """Write bytes to standard output as they are."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        raise StorageError("cannot write to standard output", found=error) from error


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        pass  # the reader has gone, as with `| head`; the exit code still tells how it went
    except OSError as error:
        raise StorageError("cannot write to standard output; the work itself is done", found=error) from error


def warn(line: str) -> None:
    """Print a line to standard error; where that has no room the exit code has to tell it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def print_error(message: str) -> None:
    """Print the one line that says what went wrong."""
    warn(f"shardkit: error: {message}")
