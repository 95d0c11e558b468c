"""`python -m shardkit` is `shardkit`."""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; stopped while it is still imported, end as it would."""
    try:
        from shardkit.cli.main import main as run
    except KeyboardInterrupt:
        os.write(2, b"shardkit: interrupted\n")
        sys.exit(128 + signal.SIGINT)
    run()


if __name__ == "__main__":
    main()
