"""A process that asks KvikIO for its settings, and prints a `KvikAnswer` as JSON; `shardkit doctor` starts it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

from shardkit.diagnosing.facts import KvikAnswer
from shardkit.errors import ShardkitError
from shardkit.storage.kvikio_settings import kvikio_settings

__all__ = ["ask"]


def ask() -> KvikAnswer:
    """Return KvikIO's settings, or why it does not tell them."""
    try:
        return KvikAnswer(settings=kvikio_settings())
    except ShardkitError as error:
        return KvikAnswer(error=error.what if error.found is None else f"{error.what}: {error.found}")


def main() -> None:
    """Print the answer, and end without the libraries' leave: some crash when they are unloaded."""
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    os.write(output, json.dumps(asdict(ask())).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
