"""What arguments may be, known without importing what does the work."""

from __future__ import annotations

from shardkit.errors import ConfigError

__all__ = ["LEVELS", "refuse_empty"]

LEVELS = ("index", "structure", "checksum", "decode")
"""Of `shardkit.verifying.report.LEVELS`."""


def refuse_empty(names: str, *given: str | None) -> None:
    """Refuse an empty name, such as an empty variable of a shell gives: it would be the current folder.

    Args:
        names: what the arguments are called, as the subject of a sentence: `DATASET is the name of a folder`.
        given: the arguments; None for one that was not given.

    Raises:
        ConfigError: one is empty.
    """
    if "" in given:
        raise ConfigError(names, found="an empty one")
