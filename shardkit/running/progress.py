"""Progress that nobody looks at."""

from __future__ import annotations

__all__ = ["Silent"]


class Silent:
    """Takes what every run tells of how far it has come."""

    def begin(self, *_: int) -> None:
        """Do nothing."""

    def advance(self, *_: int) -> None:
        """Do nothing."""
