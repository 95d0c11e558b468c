"""Folders of JPEGs become aligned, indexed WebDataset shards that PyTorch iterates.

Every name below is looked up when it is first used, so `import shardkit` costs milliseconds and needs nothing but
the standard library. The loader for PyTorch is `shardkit.torch.ShardLoader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.version import __version__

if TYPE_CHECKING:
    from shardkit.converting.foreign_result import ForeignConversion
    from shardkit.converting.foreign_run import convert_to
    from shardkit.converting.run import Conversion, convert
    from shardkit.dataset.shardset import Dataset, Sample
    from shardkit.dataset.shardset import open_dataset as open
    from shardkit.errors import ShardkitError
    from shardkit.exporting.run import export
    from shardkit.format.manifest import Manifest
    from shardkit.indexing.run import index
    from shardkit.inspecting.report import Inspection
    from shardkit.inspecting.run import inspect
    from shardkit.packing.run import pack
    from shardkit.repairing.run import repair
    from shardkit.verifying.report import Report
    from shardkit.verifying.run import verify

__all__ = [
    "Conversion",
    "Dataset",
    "ForeignConversion",
    "Inspection",
    "Manifest",
    "Report",
    "Sample",
    "ShardkitError",
    "__version__",
    "convert",
    "convert_to",
    "export",
    "index",
    "inspect",
    "open",
    "pack",
    "repair",
    "verify",
]

_HOMES = {
    "Conversion": ("shardkit.converting.run", "Conversion"),
    "Dataset": ("shardkit.dataset.shardset", "Dataset"),
    "ForeignConversion": ("shardkit.converting.foreign_result", "ForeignConversion"),
    "Inspection": ("shardkit.inspecting.report", "Inspection"),
    "Manifest": ("shardkit.format.manifest", "Manifest"),
    "Report": ("shardkit.verifying.report", "Report"),
    "Sample": ("shardkit.dataset.shardset", "Sample"),
    "ShardkitError": ("shardkit.errors", "ShardkitError"),
    "convert": ("shardkit.converting.run", "convert"),
    "convert_to": ("shardkit.converting.foreign_run", "convert_to"),
    "export": ("shardkit.exporting.run", "export"),
    "index": ("shardkit.indexing.run", "index"),
    "inspect": ("shardkit.inspecting.run", "inspect"),
    "open": ("shardkit.dataset.shardset", "open_dataset"),
    "pack": ("shardkit.packing.run", "pack"),
    "repair": ("shardkit.repairing.run", "repair"),
    "verify": ("shardkit.verifying.run", "verify"),
}

if not TYPE_CHECKING:  # a type checker would take any name for granted if it saw `__getattr__`

    def __getattr__(name: str) -> object:
        """Import the home of a public name at its first use."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        from importlib import import_module

        module, attribute = _HOMES[name]
        value = getattr(import_module(module), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names before they were used, too."""
    return sorted({*globals(), *__all__})
