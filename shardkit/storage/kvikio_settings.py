"""KvikIO's settings as it takes them: its own defaults, and the environment over them.

Asking starts no thread of cuFile's, opens no driver and needs no GPU; only the settings are looked at.
"""

from __future__ import annotations

import re

from shardkit.errors import CapabilityError

__all__ = ["kvikio_settings"]

_NAMES = (
    "compat_mode", "num_threads", "task_size", "gds_threshold", "bounce_buffer_size", "auto_direct_io_read",
    "auto_direct_io_write",
)  # fmt: skip
_PLACE = re.compile(r"^KvikIO failure at: \S+: ")


def kvikio_settings() -> dict[str, str | int | bool]:
    """Return the settings by KvikIO's names for them: sizes in bytes, the mode as "AUTO", "ON" or "OFF".

    Those that the installed version does not know are left out.

    Raises:
        CapabilityError: KvikIO cannot be loaded, or does not take what the environment says.
    """
    found: dict[str, str | int | bool] = {}
    try:
        import kvikio.defaults

        for name in _NAMES:
            try:
                value = kvikio.defaults.get(name)
            except KeyError:
                continue
            found[name] = value.name if name == "compat_mode" else value
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = _PLACE.sub("", str(error).strip().splitlines()[0]) if str(error).strip() else type(error).__name__
        raise CapabilityError("KvikIO's settings cannot be read", found=reason) from error
    return found
