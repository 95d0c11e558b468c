"""SplitMix64 (Steele, Lea, Flood 2014): the one hash of numbers that orders and random choices are drawn from.

Its constants decide the order of every pack and of every epoch, so they never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MIX_A", "MIX_B", "STEP", "U64", "finalise", "mix", "unfinalise"]

U64: Final = (1 << 64) - 1
STEP: Final = 0x9E3779B97F4A7C15
"""What the generator's state grows by."""
MIX_A: Final = 0xBF58476D1CE4E5B9
MIX_B: Final = 0x94D049BB133111EB
_UNMIX_A: Final = pow(MIX_A, -1, 1 << 64)
_UNMIX_B: Final = pow(MIX_B, -1, 1 << 64)


def mix(value: int) -> int:
    """Return the number that the generator draws from a state: a bijection of [0, 2**64).

    >>> hex(mix(0))
    '0xe220a8397b1dcdaf'
    """
    z = (value + STEP) & U64
    z = ((z ^ (z >> 30)) * MIX_A) & U64
    z = ((z ^ (z >> 27)) * MIX_B) & U64
    return z ^ (z >> 31)


def finalise(states: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash each state in place, the step already added, and return the array: a bijection on each number.

    >>> hex(int(finalise(np.array([STEP], np.uint64))[0]))
    '0xe220a8397b1dcdaf'
    """
    for shift, factor in ((30, MIX_A), (27, MIX_B)):
        states ^= states >> np.uint64(shift)
        states *= np.uint64(factor)
    states ^= states >> np.uint64(31)
    return states


def unfinalise(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Turn hashes back, in place, into the states that `finalise` made them of, and return the array.

    >>> unfinalise(finalise(np.array([0, 7], np.uint64))).tolist()
    [0, 7]
    """
    for shift, factor in ((31, _UNMIX_B), (27, _UNMIX_A)):
        hashes ^= hashes >> np.uint64(shift) ^ hashes >> np.uint64(2 * shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(30) ^ hashes >> np.uint64(60)
    return hashes
