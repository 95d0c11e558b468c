"""Which of the errors of work done side by side ends a run: the first in the order of the work, whatever the timing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardkit.errors import ShardkitError

__all__ = ["FirstError"]


class FirstError:
    """The error of the piece with the lowest number so far.

    A run with one job stops at the first error that it meets. One with several meets others earlier, and says the same
    only if it waits for the pieces before: what is behind an error is begun no more, and what is before it is ended.

    >>> from shardkit.errors import ShardkitError
    >>> first = FirstError()
    >>> first.note(7, ShardkitError("later")), first.matters(8), first.matters(3)
    (None, False, True)
    >>> first.note(3, ShardkitError("earlier")), first.note(5, ShardkitError("between"))
    (None, None)
    >>> first.error.what
    'earlier'
    """

    def __init__(self) -> None:
        """Begin without an error."""
        self.error: ShardkitError | None = None
        self._number = -1

    def note(self, number: int, error: ShardkitError) -> None:
        """Take the error of a piece of work."""
        if self.matters(number):
            self._number, self.error = number, error

    def matters(self, number: int) -> bool:
        """Tell whether a piece stands before every error, so that one of it would be what ends the run."""
        return self.error is None or number < self._number

    def raise_unless_open(self, running: Iterable[int] = ()) -> None:
        """Raise the error, if there is one, unless a piece before it is still under way.

        Raises:
            ShardkitError: the error.
        """
        if self.error is not None and not any(map(self.matters, running)):
            raise self.error
