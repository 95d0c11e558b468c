"""What `import shardkit` and `shardkit --help` may cost: no heavy module, little CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "nvidia", "kvikio", "cupy"}
NOT_FOR_HELP = HEAVY | {"numpy", "pyarrow", "PIL", "multiprocessing.pool", "concurrent.futures.process"}

_IMPORT = "import shardkit"
_HELP = """
import sys
sys.argv = ["shardkit", *{arguments!r}]
from shardkit.cli.main import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
"""
_LIST = "\nimport sys\nprint('modules:', *sys.modules)"


def modules_after(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code + _LIST], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].removeprefix("modules: ").split())


def cpu_seconds(code: str) -> float:
    """User and system time of one child, start of the interpreter included."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_import_of_the_package_needs_the_standard_library_only():
    loaded = {name.split(".")[0] for name in modules_after(_IMPORT)}
    loaded -= {name.split(".")[0] for name in modules_after("")}
    assert loaded <= sys.stdlib_module_names | {"shardkit"}


@pytest.mark.parametrize(
    "line", ["--help", "--version", "pack --help", "verify --help", "doctor --help", "inspect --help"]
)
def test_help_imports_no_heavy_module(line):
    loaded = modules_after(_HELP.format(arguments=line.split()))
    assert loaded & NOT_FOR_HELP == set()
    assert "click" in loaded  # else nothing ran


def test_help_takes_little_cpu():
    assert min(cpu_seconds(_HELP.format(arguments=["--help"])) for _ in range(3)) < 0.4


def test_a_heavy_import_would_be_seen():
    assert "numpy" in modules_after("import numpy")
    assert cpu_seconds("import time\nwhile time.process_time() < 0.5: pass") > 0.4
