"""The reading side of a loader: threads that keep a bounded number of batches read ahead of whoever decodes them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from shardkit.dataset.batch import EncodedBatch
from shardkit.errors import CapabilityError, ConfigError, StorageError, forget_frames
from shardkit.escaping import escape
from shardkit.tracing import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardkit.dataset.source import Reading, Step
    from shardkit.storage.reader import Pending

__all__ = ["PATIENCE_S", "STUCK_AFTER_S", "Fetcher"]

STUCK_AFTER_S = 30.0
"""Seconds after which a read that has not ended is reported."""
PATIENCE_S = 0.7
"""Seconds for a read in progress when everything is to end; then it is left behind."""
_THREADS = 2  # while one waits for the storage, the other plans the next batch
_LOOK_S = 0.5  # how often who waits looks whether a read is stuck

_log = logging.getLogger(__name__)


class Fetcher:
    """Reads the batches of its steps ahead, in threads of its own, until `depth` of them wait; then it rests.

    One consumer calls `get` and `replace`; `close` may be called from any thread. The consumer releases each batch
    that it took: the threads wait when the pool's budget is used up. So a consumer may wait for a batch
    (`get(wait=True)`) only while it holds none, else both would wait for each other.

    A reading that reads ahead gets one thread more, which looks for work whenever a step was begun or read. What it
    fails at it does not tell: a step that needs it fails at that, too, and in its turn.
    """

    def __init__(
        self, reading: Reading, steps: Iterable[Step], *, depth: int,
        replace: Callable[[EncodedBatch, Mapping[int, str]], EncodedBatch],
        oldest: Callable[[], Pending | None], opened: list[Fetcher] | None = None,
        stuck_after_s: float = STUCK_AFTER_S, timeout_s: float | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        """Start to read.

        Args:
            reading: how a step becomes a batch.
            steps: in the order in which the batches are wanted; consumed in the threads.
            depth: batches that may wait; >= 1.
            replace: what `replace` does.
            oldest: of the reader; tells which read is stuck.
            opened: gets the fetcher before its threads start, so that it can be closed whatever interrupts.
            stuck_after_s: seconds until a read that has not ended is reported, once.
            timeout_s: seconds until such a read is an error for who waits for it; None waits for ever.
            patience_s: seconds that `close` waits for reads in progress.

        Raises:
            ConfigError: `depth` is below 1.
        """
        if depth < 1:
            raise ConfigError("at least one batch is read ahead", expected=">= 1", found=depth)
        self._reading: Reading | None = reading  # until the last step was begun: it may hold memory of its own
        self._depth, self._replace = depth, replace
        self._oldest, self._stuck_after_s, self._timeout_s = oldest, stuck_after_s, timeout_s
        self._patience_s = patience_s
        self._ready: deque[EncodedBatch | BaseException] = deque()
        # Taken by itself and not through the condition, whose Python code Ctrl-C can leave with the lock held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._beginning = threading.Lock()  # steps are begun one by one, in their order
        self._steps, self._begun, self._stopped = iter(steps), 0, False
        self._handed_over = 0
        self._ended = self._closed = False
        self._reported: tuple[str, int] | None = None  # the read that was told of last
        self._look_s = min(_LOOK_S, stuck_after_s, timeout_s or _LOOK_S)
        self.waited_s = 0.0
        """Seconds for which `get` has waited so far."""
        self._gone: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        self._bell: queue.SimpleQueue[None] | None = queue.SimpleQueue() if reading.reads_ahead else None
        self._running = 0
        if opened is not None:
            opened.append(self)
        self._start()

    def get(self, *, wait: bool) -> EncodedBatch | None:
        """Return the next batch, in the order of the steps; see `shardkit.pipeline.decoder.BatchSource`.

        Raises:
            StorageError: a read has not ended in `timeout_s`; or what reading raised.
        """
        started = time.perf_counter()
        with self._lock, ranges("wait for read"):
            while wait and not self._ready and not self._ended and not self._closed:
                if not self._changed.wait(self._look_s):
                    self._look_for_stuck_read()
            item = self._ready.popleft() if self._ready else None
            self._changed.notify_all()
        if wait:
            self.waited_s += time.perf_counter() - started
        if isinstance(item, BaseException):
            raise item
        return item

    def replace(self, batch: EncodedBatch, bad: Mapping[int, str], /) -> EncodedBatch:
        """Put substitutes into the places of bad samples; see `shardkit.pipeline.decoder.BatchSource`."""
        return self._replace(batch, bad)

    def check(self) -> None:
        """Report a read that does not end, or raise; for who waits in another way than by `get`.

        Raises:
            StorageError: a read has not ended in `timeout_s`.
        """
        self._look_for_stuck_read()

    def close(self) -> bool:
        """Stop the threads, wait a moment for reads in progress, and release what was not taken; idempotent.

        Batches that were taken must be released before, or the threads could wait for their memory.

        Returns:
            False when a read does not end: its thread is left behind, and so is the memory that it reads into.
        """
        with self._lock:
            self._closed = True
            self._drop_ready()
            self._changed.notify_all()
        self._ring()
        end = time.monotonic() + self._patience_s
        # Asked by a queue: after Ctrl-C inside of it, a thread's own `join` takes the thread for dead.
        while self._running:
            try:
                thread = self._gone.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                break
            self._running -= 1
            thread.join()  # it is at its end
        self._drop_ready()
        self._reading = None
        return self._oldest() is None and not self._running

    def _start(self) -> None:
        works = {f"shardkit-fetch-{number}": self._run for number in range(_THREADS)}
        if self._bell is not None:
            works["shardkit-fetch-ahead"] = self._run_ahead
        threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]
        try:
            for thread in threads:
                self._running += 1
                thread.start()
        except BaseException as error:
            self._running -= thread.ident is None
            self.close()
            if isinstance(error, RuntimeError):
                raise CapabilityError("a thread for reading cannot be started", found=str(error)) from error
            raise

    def _run(self) -> None:
        more = True
        try:
            while more:
                number, item = self._read_next()
                self._ring()
                if isinstance(item, BaseException):
                    forget_frames(item)
                more = self._hand_over(number, item)
                del item  # while the next one is read, the memory of this one is the consumer's business alone
        finally:
            self._gone.put(threading.current_thread())

    def _read_next(self) -> tuple[int, EncodedBatch | BaseException | None]:
        """Return a number, rising from 0, and the batch that has it, or why there is none; None is the end."""
        number = 0
        try:
            with self._beginning:
                number, self._begun = self._begun, self._begun + 1
                reading = None if self._stopped or self._closed else self._reading
                step = None if reading is None else next(self._steps, None)
                if reading is None or step is None:
                    self._stopped, self._reading = True, None
                    return number, None
                with ranges("plan", step.number):
                    read = reading.begin(step)
            self._ring()
            with ranges("read", step.number) as span:
                batch = read()
                span.nbytes = int(batch.located.size.sum())
            return number, batch
        except BaseException as error:  # whatever it is, the consumer has to see it
            self._stopped = True
            return number, error

    def _run_ahead(self) -> None:
        bell = self._bell
        try:
            while bell is not None and not self._stopped and not self._closed:
                bell.get()
                with contextlib.suppress(queue.Empty):
                    while True:
                        bell.get_nowait()  # one look answers them all
                while self._read_ahead():
                    pass
        finally:
            self._gone.put(threading.current_thread())

    def _read_ahead(self) -> bool:
        """Read one part of later steps; return whether another one may follow. It keeps nothing of it."""
        try:
            with self._beginning:
                reading = None if self._stopped or self._closed else self._reading
                work = None if reading is None else reading.ahead()
                del reading
            if work is not None:
                with ranges("read ahead"):
                    work()
            return work is not None
        except BaseException as error:  # a step that needs it tells
            forget_frames(error)
            return False

    def _ring(self) -> None:
        """Have the thread that reads ahead look whether there is work, or whether it is to end."""
        if self._bell is not None:
            self._bell.put(None)

    def _hand_over(self, number: int, item: EncodedBatch | BaseException | None) -> bool:
        """Wait until it is the turn of a batch and there is room for it; return whether to go on."""
        with self._lock:
            while not self._closed and not self._ended and (number != self._handed_over or self._full(item)):
                self._changed.wait()
            if self._closed or self._ended:
                if isinstance(item, EncodedBatch):
                    item.release()
                return False
            self._handed_over += 1
            self._ended = not isinstance(item, EncodedBatch)
            if item is not None:
                self._ready.append(item)
            self._changed.notify_all()
            return not self._ended

    def _full(self, item: EncodedBatch | BaseException | None) -> bool:
        return isinstance(item, EncodedBatch) and len(self._ready) >= self._depth

    def _look_for_stuck_read(self) -> None:
        pending = self._oldest()
        if pending is None:
            return
        if self._timeout_s is not None and pending.seconds >= self._timeout_s:
            raise StorageError(
                "a read does not end", path=pending.path, offset=pending.offset,
                expected=f"an answer within {self._timeout_s:g} s", found=f"none after {pending.seconds:.1f} s",
                remedy="look at the server or the device behind this path, or take a longer timeout=",
            )  # fmt: skip
        read = pending.path, pending.offset
        if pending.seconds >= self._stuck_after_s and read != self._reported:
            self._reported = read
            _log.warning(
                "%s:%d: a read has not ended for %.0f s; still waiting", escape(pending.path), pending.offset,
                pending.seconds,
            )  # fmt: skip

    def _drop_ready(self) -> None:
        while self._ready:
            item = self._ready.popleft()
            if isinstance(item, EncodedBatch):
                item.release()
