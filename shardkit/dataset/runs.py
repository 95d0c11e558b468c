"""What one request reads along, and arithmetic of numbered blocks, what lies between them, and runs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    _Ints = npt.NDArray[np.int64]

__all__ = ["GAP_BYTES", "gaps", "ranges", "runs"]

GAP_BYTES = 32 * 1024
"""Bytes between two wanted ranges that are read along: about what a further request costs."""


def ranges(first: _Ints, count: _Ints) -> _Ints:
    """Return the numbers of all ranges, one range after the other.

    >>> ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    array([ 5,  6,  9, 10, 11])
    """
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - count), count) + np.arange(total)


def gaps(blocks: _Ints, group: _Ints, most: int) -> tuple[_Ints, _Ints]:
    """Return the blocks of every gap of at most `most` blocks between neighbours of one group.

    Args:
        blocks: [n] rising, each once.
        group: [n] of each; gaps between two groups are left alone.
        most: blocks.

    Returns:
        The blocks, and the gap that each belongs to: the place of its left neighbour in `blocks`.

    >>> gaps(np.array([1, 3, 4, 9, 11]), np.array([0, 0, 0, 0, 1]), 2)
    (array([2]), array([0]))
    """
    count = np.diff(blocks) - 1
    left = np.flatnonzero((count > 0) & (count <= most) & (group[1:] == group[:-1]))
    return ranges(blocks[left] + 1, count[left]), np.repeat(left, count[left])


def runs(blocks: _Ints, group: _Ints, most: int) -> tuple[_Ints, _Ints]:
    """Return runs of consecutive blocks of one group: the place of the first of each in `blocks`, and how many.

    Args:
        blocks: [n] rising, each once.
        group: [n] of each.
        most: blocks of a run; a longer one is cut into as few as can be, of equal length but for one block.

    >>> runs(np.array([1, 2, 3, 4, 5, 9]), np.array([0, 0, 0, 0, 1, 1]), 3)
    (array([0, 2, 4, 5]), array([2, 2, 1, 1]))
    """
    if not len(blocks):
        return blocks, blocks
    apart = np.ones(len(blocks), np.bool_)
    apart[1:] = (np.diff(blocks) != 1) | (group[1:] != group[:-1])
    first = np.flatnonzero(apart)
    length = np.diff(np.append(first, len(blocks)))
    inside, whole = np.arange(len(blocks)) - np.repeat(first, length), np.repeat(length, length)
    part = inside * -(-whole // most) // whole
    apart[1:] |= part[1:] != part[:-1]
    cut = np.flatnonzero(apart)
    return cut, np.diff(np.append(cut, len(blocks)))
