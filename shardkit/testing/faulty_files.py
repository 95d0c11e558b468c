"""Files whose reads fail as a script says: a small FUSE server, so that the kernel itself gives the bad answers.

The files lie in an ordinary folder, flat, and appear unchanged under a mount. Each read of one (O_DIRECT or not)
reaches the server as it was asked for, because files are opened with FOPEN_DIRECT_IO, and is answered by the next
entry of the file's script: the bytes, fewer of them, an error, or nothing until it is released.

A process that waits for an answer cannot be killed, so nothing may be left waiting. The server is a process of its own
that dies with the thread that started it, and after two minutes in any case; its end is the end of the connection, on
which the kernel fails everything that waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from shardkit.testing.mounts import NoMountsError, private_mounts

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HANG", "RIGHT", "FaultyFiles", "Reply", "faulty_files"]

_LIFETIME_S = 120
_PATIENCE_S = 20.0
_PR_SET_PDEATHSIG = 1
_LAZY = 2  # MNT_DETACH

# linux/fuse.h
_IN_HEADER = struct.Struct("=IIQQIIIHH")
_OUT_HEADER = struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_INIT_REPLY = struct.Struct("=IIIIHHIIHHII24x")
_READ = struct.Struct("=QQII")
_STATFS_REPLY = struct.Struct("=QQQQQIII28x")
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ_FILE, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _INTERRUPT, _DESTROY, _BATCH_FORGET = 25, 26, 36, 38, 42
_ASYNC_READ, _MAX_PAGES = 1 << 0, 1 << 22
_DIRECT_IO = 1 << 0
_REQUEST_BYTES = 1 << 17
_ROOT = 1


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one read."""

    most: int | None = None
    """Bytes that are given at most; None for all that was asked for."""
    error: int = 0
    """The errno that is given instead."""
    hang: bool = False
    """Whether the answer is kept back until it is released; a signal to the reader ends it with EINTR."""


RIGHT = Reply()
HANG = Reply(hang=True)


class FaultyFiles:
    """A mounted folder whose reads follow scripts."""

    def __init__(self, path: Path, backing: Path, server: IO[str]) -> None:
        """Talk to a running server."""
        self.path = path
        """Where the files are read."""
        self.backing = backing
        """Where they are written, cut and replaced; under the same names."""
        self._server = server

    def script(self, name: str, *replies: Reply, forever: bool = False) -> None:
        """Give the answers to the next reads of a file; after them, or while there are none, reads are right.

        Args:
            name: of the file.
            replies: one for each read, in the order in which the kernel asks.
            forever: whether the last one is repeated without end.
        """
        self._ask({"script": name, "replies": [asdict(reply) for reply in replies], "forever": forever})

    def reads(self, name: str) -> list[tuple[int, int]]:
        """Return (offset, bytes) of each read of a file that the kernel has asked for since the last script."""
        return [(offset, size) for offset, size in self._ask({"reads": name})]

    def wait_for_hung(self, count: int = 1) -> None:
        """Return when this many reads are kept back; fails after twenty seconds."""
        until = time.monotonic() + _PATIENCE_S
        while len(self._ask({"hung": True})) < count:
            assert time.monotonic() < until, "no read came"
            time.sleep(0.005)

    def release(self) -> None:
        """Answer every read that is kept back."""
        self._ask({"release": True})

    def _ask(self, request: dict[str, object]) -> list[tuple[int, int]]:
        self._server.write(json.dumps(request) + "\n")
        self._server.flush()
        answer: list[tuple[int, int]] = json.loads(self._server.readline())
        return answer


@contextlib.contextmanager
def faulty_files(at: Path) -> Iterator[FaultyFiles]:
    """Mount the files of the folder `at`/backing at `at`/mounted, both made here.

    Raises:
        NoMountsError: only root can mount, and not on every machine; says what is missing.
    """
    private_mounts()
    backing, mounted = at / "backing", at / "mounted"
    for folder in (at, backing, mounted):
        folder.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NoMountsError(f"no FUSE here: {error}") from error
    with contextlib.ExitStack() as stack:
        ours, theirs = socket.socketpair()
        talk = stack.enter_context(ours.makefile("rw"))
        stack.enter_context(ours)
        try:
            _mount(device, mounted)
            stack.callback(_unmount, mounted)
            numbers = [device, theirs.fileno()]
            command = [sys.executable, "-m", __name__, *map(str, numbers), str(backing), str(os.getpid())]
            server = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL)
        finally:
            theirs.close()
            os.close(device)  # the server's must be the last one: with it the connection ends
        stack.enter_context(server)
        stack.callback(server.kill)
        yield FaultyFiles(mounted, backing, talk)


def _mount(device: int, at: Path) -> None:
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if ctypes.CDLL(None, use_errno=True).mount(b"faulty", os.fsencode(at), b"fuse", 0, options):
        raise NoMountsError(f"cannot mount FUSE: {os.strerror(ctypes.get_errno())}")


def _unmount(at: Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(at), _LAZY)


@dataclass(frozen=True, slots=True)
class _Read:
    request: int
    name: str
    offset: int
    size: int


class _Server:
    """Answers the kernel on one side and the test on the other, in one thread, so that nothing waits for itself."""

    def __init__(self, device: int, test: socket.socket, backing: Path) -> None:
        self._device, self._test, self._backing = device, test, backing
        self._names: dict[int, str] = {}
        self._scripts: dict[str, tuple[deque[Reply], bool]] = {}
        self._reads: dict[str, list[tuple[int, int]]] = {}
        self._hung: dict[int, _Read] = {}

    def serve(self) -> None:
        with selectors.DefaultSelector() as ready, self._test.makefile("rw") as talk:
            ready.register(self._device, selectors.EVENT_READ)
            ready.register(self._test, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fd == self._device:
                        self._answer_kernel()
                    elif line := talk.readline():
                        talk.write(json.dumps(self._answer_test(json.loads(line))) + "\n")
                        talk.flush()
                    else:
                        return

    def _answer_test(self, request: dict[str, object]) -> list[tuple[int, int]]:
        if "script" in request:
            replies = deque(Reply(**fields) for fields in request["replies"])  # type: ignore[attr-defined]
            self._scripts[str(request["script"])] = replies, bool(request["forever"])
            self._reads.pop(str(request["script"]), None)
        elif "reads" in request:
            return self._reads.get(str(request["reads"]), [])
        elif "release" in request:
            while self._hung:
                self._give(self._hung.popitem()[1], RIGHT)
        return [(read.offset, read.size) for read in self._hung.values()]

    def _answer_kernel(self) -> None:
        message = os.read(self._device, 2 * _REQUEST_BYTES)
        _, what, request, node, *_ = _IN_HEADER.unpack_from(message)
        body = message[_IN_HEADER.size :]
        if what in {_FORGET, _BATCH_FORGET}:
            return
        if what == _INTERRUPT:
            if read := self._hung.pop(struct.unpack_from("=Q", body)[0], None):
                self._give(read, Reply(error=errno.EINTR))
            return
        if what == _READ_FILE:
            _, offset, size, _ = _READ.unpack_from(body)
            self._read(_Read(request, self._names[node], offset, size))
            return
        try:
            self._reply(request, self._result(what, node, body))
        except OSError as error:
            self._reply(request, b"", error.errno or errno.EIO)

    def _result(self, what: int, node: int, body: bytes) -> bytes:
        if what == _INIT:
            pages = _REQUEST_BYTES // 4096
            flags = _ASYNC_READ | _MAX_PAGES
            return _INIT_REPLY.pack(7, 31, _REQUEST_BYTES, flags, 64, 48, _REQUEST_BYTES, 1, pages, 0, 0, 0)
        if what == _LOOKUP:
            name = os.fsdecode(body.rstrip(b"\0"))
            attributes = self._attributes(name)
            known = next((node for node, other in self._names.items() if other == name), 0)
            node = known or len(self._names) + _ROOT + 1
            self._names[node] = name
            return struct.pack("=QQQQII", node, 0, 0, 0, 0, 0) + attributes
        if what == _GETATTR:
            return struct.pack("=QII", 0, 0, 0) + self._attributes("" if node == _ROOT else self._names[node])
        if what == _OPEN:
            return struct.pack("=QII", 0, _DIRECT_IO, 0)
        if what == _STATFS:
            return _STATFS_REPLY.pack(0, 0, 0, 0, 0, 4096, 255, 4096)
        if what in {_RELEASE, _FLUSH, _DESTROY}:
            return b""
        raise OSError(errno.ENOSYS, "not here")

    def _attributes(self, name: str) -> bytes:
        found = os.stat(self._backing / name)
        seconds, nanoseconds = divmod(found.st_mtime_ns, 10**9)
        times = (seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds)
        return _ATTRIBUTES.pack(
            found.st_ino, found.st_size, found.st_blocks, *times, found.st_mode, found.st_nlink, 0, 0, 0, 4096, 0
        )

    def _read(self, read: _Read) -> None:
        self._reads.setdefault(read.name, []).append((read.offset, read.size))
        replies, forever = self._scripts.get(read.name, (deque(), False))
        reply = replies[0] if forever and len(replies) == 1 else replies.popleft() if replies else RIGHT
        if reply.hang:
            self._hung[read.request] = read
        else:
            self._give(read, reply)

    def _give(self, read: _Read, reply: Reply) -> None:
        if reply.error:
            self._reply(read.request, b"", reply.error)
            return
        size = read.size if reply.most is None else min(read.size, reply.most)
        with open(self._backing / read.name, "rb") as file:
            self._reply(read.request, os.pread(file.fileno(), size, read.offset))

    def _reply(self, request: int, result: bytes, error: int = 0) -> None:
        message = _OUT_HEADER.pack(_OUT_HEADER.size + len(result), -error, request) + result
        with contextlib.suppress(FileNotFoundError):  # the reader was killed meanwhile
            os.write(self._device, message)


def _main(device: str, test: str, backing: str, parent: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.alarm(_LIFETIME_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test, which ends this process then
    if os.getppid() == int(parent):
        with contextlib.suppress(ConnectionError):  # the test has gone
            _Server(int(device), socket.socket(fileno=int(test)), Path(backing)).serve()


if __name__ == "__main__":
    _main(*sys.argv[1:])
