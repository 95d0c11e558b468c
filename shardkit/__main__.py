"""`python -m shardkit` is `shardkit`."""

from __future__ import annotations

from shardkit.cli.main import main

if __name__ == "__main__":
    main()
