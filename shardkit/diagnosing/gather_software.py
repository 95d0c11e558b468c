"""Which versions of what are installed; nothing of it is imported."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from shardkit.diagnosing.facts import Software
from shardkit.diagnosing.packages import PACKAGES
from shardkit.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["gather_software"]


def gather_software(find: Callable[[str], str] = version) -> Software:
    """Return the versions.

    Args:
        find: returns the version of an installed package, or raises PackageNotFoundError.
    """
    versions = {"shardkit": __version__}
    for packages in PACKAGES.values():
        for package in packages:
            try:
                versions[package] = find(package)
            except PackageNotFoundError:
                continue
    return Software(python=platform.python_version(), versions=versions)
