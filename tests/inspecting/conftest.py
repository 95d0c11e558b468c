"""A real browser, spoken to over a pipe; and datasets whose texts are hostile."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardkit.testing.datasets import draft_dataset
from shardkit.testing.hostile import HOSTILE_TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PATIENCE_S = 30


class Page:
    """What a browser has made of a page."""

    def __init__(self, browser: Browser, session: str, url: str) -> None:
        self._browser, self._session, self.url = browser, session, url

    def ask(self, expression: str) -> Any:
        """Evaluate JavaScript; the page's own policy does not hold for it."""
        done = self._browser.call(
            "Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True}, self._session
        )
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests for anything but the page and data: URLs."""
        self.ask("new Promise(done => setTimeout(done, 150))")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            method, facts = event["method"], event["params"]
            if method == "Network.requestWillBeSent":
                url = facts["request"]["url"]
                if url != self.url and not url.startswith("data:"):
                    found.append(f"request: {url}")
            elif method == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {facts['entry']['text']}")
            elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
                found.append(f"console: {facts['args']}")
            elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
                found.append(f"{method}: {facts}")
        return found


class Browser:
    """Headless Chromium, by the protocol of its developer tools."""

    def __init__(self, command: str, folder: Path) -> None:
        # The browser reads its commands from 3 and answers on 4; above 9 nothing is in the way of these.
        ends = [fd for pair in (os.pipe(), os.pipe()) for fd in pair]
        to_child, self._out, self._in, from_child = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends)
        for fd in ends:
            os.close(fd)
        arguments = [command, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--no-first-run", "--disable-background-networking", "--remote-debugging-pipe",
                     f"--user-data-dir={folder}"]  # fmt: skip
        actions = [(os.POSIX_SPAWN_DUP2, to_child, 3), (os.POSIX_SPAWN_DUP2, from_child, 4),
                   (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                   (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                   (os.POSIX_SPAWN_OPEN, 2, str(folder / "stderr"), os.O_WRONLY | os.O_CREAT, 0o600)]  # fmt: skip
        environment = {**os.environ, "HOME": str(folder)}
        self._child = os.posix_spawn(command, arguments, environment, file_actions=actions, setpgroup=0)
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._wait(lambda event: event.get("id") == self._number)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, *, width: int = 1200, dark: bool = False) -> Page:
        """Show a file, wait until all of it is there."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session=session)
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size, session)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]}, session)
        url = path.resolve().as_uri()
        self.events.clear()
        self.call("Page.navigate", {"url": url}, session)
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._wait(lambda event: event.get("method") == "Page.loadEventFired")
        return Page(self, session, url)

    def close(self) -> None:
        """End it and everything that it started."""
        os.close(self._out)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self._in)

    def _wait(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            while b"\0" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\0")
                message = json.loads(line)
                if "method" in message:
                    self.events.append(message)
                if wanted(message):
                    return message
            if not select.select([self._in], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"the browser does not answer; its last events: {self.events[-3:]}")
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data


@pytest.fixture(scope="session")
def browser(require_tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Headless Chromium; any of its names will do."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    command = next((found for name in names if (found := shutil.which(name))), None)
    started = Browser(command or require_tool(names[0]), tmp_path_factory.mktemp("browser"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def hostile_dataset(tmp_path: Path) -> Path:
    """A dataset whose keys, sources, classes, splits and refused sources are `HOSTILE_TEXTS`."""
    draft = draft_dataset((6, 6))
    for shard in draft.shards:
        for i, row in enumerate(shard.rows):
            text = HOSTILE_TEXTS[(i + 6 * (shard is draft.shards[1])) % len(HOSTILE_TEXTS)]
            shard.rows[i] = row._replace(key=f"{text} {shard.name} {i}", source=text)
    draft.classes = tuple(f"{text}{number}" for number, text in enumerate((*HOSTILE_TEXTS, "\ud800", "\udcff")))
    lines = [{"path": text, "reason": text, "detail": text} for text in (*HOSTILE_TEXTS, "\ud83d", "\udcff")]
    draft.rejected, draft.refused = b"".join(json.dumps(line).encode() + b"\n" for line in lines), len(lines)
    folder = draft.write(tmp_path / "hostile")
    return seal_splits(folder, {text: ["tiny-000000.tar"] for text in HOSTILE_TEXTS})


def seal_splits(folder: Path, splits: dict[str, list[str]]) -> Path:
    """Give a dataset splits; return its folder."""
    import dataclasses

    from shardkit.format.manifest import dump_manifest, load_manifest

    file = folder / "manifest.json"
    file.write_text(dump_manifest(dataclasses.replace(load_manifest(file.read_bytes()), splits=splits)))
    return folder
