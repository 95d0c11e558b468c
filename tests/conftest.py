"""What every test may ask for: other people's tools, photographs, and a GPU that is really there."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from shardkit import tracing
from shardkit.testing.mounts import NoMountsError, loop_mount
from shardkit.testing.photos import photo_file, write

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from contextlib import AbstractContextManager

    from shardkit.testing.photos import Photographs
    from shardkit.tracing import Tracer

# Before any test module imports them: their assertions show values then.
pytest.register_assert_rewrite("shardkit.testing.reading", "shardkit.testing.readers", "shardkit.testing.failing_reads")

_REQUIRED = {"gpu": "SHARDKIT_REQUIRE_GPU", "peers": "SHARDKIT_REQUIRE_PEERS"}
"""Marker to the variable that makes a skip of such a test a failure."""
_IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

# A shell's `&` and nohup let their children ignore these, and every process that a test starts would inherit that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# A machine with two busy cores misses any deadline by chance. In CI the examples are the same in every run.
settings.register_profile(
    "shardkit", deadline=None, derandomize=_IN_CI, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("shardkit")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that skips itself: with SHARDKIT_NO_SKIPS=1, and one that is marked with a variable of its own.

    A suite that runs nothing must not look green.
    """
    report = yield
    wanted = (variable for marker, variable in _REQUIRED.items() if item.get_closest_marker(marker))
    name = next(wanted, "SHARDKIT_NO_SKIPS")
    if report.skipped and os.environ.get(name) == "1" and not item.get_closest_marker("rare"):
        report.outcome = "failed"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where the kernel shows no NVIDIA device."""
    if Path("/dev/nvidiactl").exists() or os.environ.get("SHARDKIT_REQUIRE_GPU") == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU in this machine"))


@pytest.fixture(autouse=True)
def _keep_signal_handlers() -> Iterator[None]:
    """A command that runs in this process leaves its signals ignored, as it should before it ends; we go on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """Return a function: the path of a command that judges us, else a skip with the reason; in CI a failure."""

    def require(name: str) -> str:
        path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
        if path is None and _IN_CI:
            pytest.fail(f"{name} is missing, and CI must compare with it: add its package to .ci/run")
        if path is None:
            pytest.skip(f"{name} is not installed")
        return path

    return require


@pytest.fixture(scope="session")
def photographs() -> Photographs:
    """Two real photographs, [427, 640, 3] uint8 RGB each. Shared: do not write into them."""
    from sklearn.datasets import load_sample_images  # half a second that most runs do not need

    return load_sample_images().images


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    """A tracer that records while the test runs."""
    started = tracing.start()
    yield started
    tracing.stop(started)


@pytest.fixture(scope="session")
def photo_tree(tmp_path_factory: pytest.TempPathFactory, photographs: Photographs) -> Path:
    """A tree of 40 photographs in 5 classes. Shared: only read it."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(40):
        write(root, photo_file(photographs, number, classes=5))
    return root


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="shardkit-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


_SIZES = {"btrfs": 400 << 20, "ext4": 64 << 20, "xfs": 320 << 20}


@pytest.fixture(scope="module")
def folder_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Return a function: a new folder on a small file system of a kind; those of a module share one."""
    there: dict[str, Path] = {}
    with contextlib.ExitStack() as stack:

        def folder(kind: str) -> Path:
            if kind not in there:
                place = tmp_path_factory.mktemp(kind)
                stack.callback(lambda: (place / "image").unlink(missing_ok=True))
                try:
                    disk = loop_mount(place / "image", place / "mounted", kind, size=_SIZES[kind])
                    there[kind] = stack.enter_context(disk).path
                except NoMountsError as error:
                    if _IN_CI and str(error).endswith("is not installed"):
                        pytest.fail(f"{error}: add its package to .ci/run")
                    pytest.skip(str(error))
            return Path(tempfile.mkdtemp(dir=there[kind]))

        yield folder
        gc.collect()  # what an error has seen is still open while somebody may look at it


@pytest.fixture
def unprivileged() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which file modes count, which they do not for root."""

    @contextlib.contextmanager
    def switch() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return switch
