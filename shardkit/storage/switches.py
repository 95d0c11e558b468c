"""What switches parts of cuFile and its like on and off: words of the environment, and cuFile's own configuration."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["config_path", "config_switch", "flag"]

_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.S)


def flag(text: str | None) -> bool | None:
    """Return what a word means as a switch; None for no word, or another one.

    >>> flag("Y"), flag("off"), flag("maybe"), flag(None)
    (True, False, None, None)
    """
    word = (text or "").strip().lower()
    if word in {"1", "y", "yes", "on", "true"}:
        return True
    return False if word in {"0", "n", "no", "off", "false"} else None


def config_path(environment: Mapping[str, str]) -> str:
    """Return the path of the configuration that cuFile reads."""
    return environment.get("CUFILE_ENV_PATH_JSON") or "/etc/cufile.json"


def config_switch(text: str, name: str) -> bool | None:
    r"""Return whether a cufile.json, comments and all, turns a switch on anywhere; None where it does not name it.

    Raises:
        ValueError: it is not JSON.

    >>> config_switch('{"properties": {// x\n"use_pci_p2pdma": true}}', "use_pci_p2pdma")
    True
    """
    plain = _COMMENT.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    document = json.loads(re.sub(r",(\s*[}\]])", r"\1", plain))
    found = [value for value in _values(document, name) if isinstance(value, bool)]
    return any(found) if found else None


def _values(node: Any, name: str) -> Iterator[Any]:  # noqa: ANN401 - what JSON holds
    if isinstance(node, dict):
        for key, value in node.items():
            if key == name:
                yield value
            else:
                yield from _values(value, name)
