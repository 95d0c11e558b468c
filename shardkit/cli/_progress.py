"""How far a command has come, on a terminal; nothing elsewhere."""

from __future__ import annotations

from typing import Any

__all__ = ["ItemBar", "Line"]


class Line:
    """One line on standard error that is drawn anew. A context manager that leaves it behind."""

    def __init__(self, command: str, *, shown: bool) -> None:
        """Draw nothing yet.

        Args:
            command: what the line begins with.
            shown: False draws nothing, ever.
        """
        self._command = command
        self._shown = shown
        self._bar: Any = None  # Any: tqdm has no types

    def begin(self, total: int | None = None, unit: str = "B", *, scaled: bool = True) -> None:
        """Begin, or begin anew on the next line.

        Args:
            total: of what there is to do; None when nobody knows.
            unit: behind a number.
            scaled: write thousands as k, millions as M.
        """
        self.__exit__()
        if self._shown:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=unit, unit_scale=scaled, desc=self._command, smoothing=0.05)

    def advance(self, count: int) -> None:
        """Go on by so much."""
        if self._bar is not None:
            self._bar.update(count)

    def note(self, text: str) -> None:
        """Put a text behind the numbers, from the next time that it is drawn."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def __enter__(self) -> Line:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the line."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


class ItemBar:
    """The line of a run over samples, or other items, of some bytes; what `PackProgress` and its like want."""

    def __init__(self, shown: bool, command: str, items: str = "samples") -> None:
        """Show it or not, under the name of the command; `items` is the plural of what is counted."""
        self._line = Line(command, shown=shown)
        self._items = items
        self._done = self._total = 0
        self._refused: int | None = None

    def begin(self, items: int, size: int) -> None:
        """Start anew: so many items, of so many bytes."""
        self._done, self._total, self._refused = 0, items, None
        self._line.begin(size)

    def advance(self, items: int, size: int, refused: int | None = None) -> None:
        """Go on: so many items more, of so many bytes, and of these refused ones where that is counted."""
        self._done += items
        told = f"{self._done:,}/{self._total:,} {self._items}"
        if refused is not None:
            self._refused = (self._refused or 0) + refused
            told += f", {self._refused:,} refused"
        self._line.note(told)
        self._line.advance(size)

    def __enter__(self) -> ItemBar:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the line."""
        self._line.__exit__()
