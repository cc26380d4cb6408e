"""Requests in flight of a pipeline: marks that its steps share in a file in memory.

Preprocess sets a mark for each request that it hands over to the core, and sends the mark's place
and secret number past the core in the request ticket. Postprocess clears the mark. Triton drops a
request whose client has left, and tells no step. Such a request is lost: its mark stays set, and
requests that were handed over later are answered.

Each process writes words of its own slot only, except that postprocess clears marks. The name of
the file has the version of its layout and the server, which is a process in a PID namespace. A
server removes only files of dead servers in its own namespace. The supervisor of a server reads the
file, so this module needs the standard library only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SHARED_MEMORY = Path("/dev/shm")
PREFIX_VARIABLE = "TRIPTYCH_SERVER_MARK"
"""Variable with a prefix for the files in shared memory, so that they can be removed later."""
FORMAT = 6
"""Version of the layout of the file. While a pipeline is replaced, its old steps and its new ones
may have different versions, and then use different files."""
SLOTS = 64
"""Maximum number of processes of a pipeline that share a file."""
MARKS = 1024
"""Maximum number of requests of a process that are in the core and behind it."""
REORDER_S = 0.1
"""Seconds by which two requests may change places on their way to a core with one instance: Triton
has kept no order between steps since 25.06."""

_CLOSED_AT, _USED, _CORES, _HEADER = range(4)
_HOLDER, _WAITING, _WAITING_ROWS, _ACKNOWLEDGED, _TOP, _DONE_AT, _NEWEST, _LONGEST, _SLOT = range(9)
_NEW_MARKS = 32


class Ticket(NamedTuple):
    """Place and secret number of a mark; zeros if the request has none."""

    place: int = 0
    number: int = 0


class AnswerTimes(NamedTuple):
    """Time of the last answer, and of the hand-over of the newest request that is answered.

    Times are in seconds by `time.monotonic`.
    """

    at: float
    newest: float


class InFlight:
    """Marks and counts of one pipeline on one server.

    Args:
        pipeline: Name of the pipeline.
        cores: Number of batches that the core computes at a time; 0 in a process that hands over
            no requests.

    Attributes:
        pipeline: Name of the pipeline.
        slot: Slot of this process.
    """

    def __init__(self, pipeline: str, cores: int = 0) -> None:
        server = _identify(os.getppid())
        for other in SHARED_MEMORY.glob(f"triptych_*in_flight.*.{_namespace()}-*.{pipeline}"):
            owner = other.name.split(".")[2]
            if _identify(int(owner.split("-")[1])) != owner:  # its server is dead
                other.unlink(missing_ok=True)
        self._open(SHARED_MEMORY / f"{_prefix()}in_flight.{FORMAT}.{server}.{pipeline}")
        self._free: list[int] = []
        with self.path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for slot in range(SLOTS):
                self.slot, self._own = slot, self._slots[slot * _SLOT :][:_SLOT]
                holder = self._own[_HOLDER]
                if not holder or not Path(f"/proc/{holder}").exists():
                    self._head[_USED] = max(self._head[_USED], slot + 1)
                    self._head[_CORES] = cores or self._head[_CORES]
                    self._own[_WAITING] = self._own[_WAITING_ROWS] = self._own[_ACKNOWLEDGED] = 0
                    self._own[_HOLDER] = os.getpid()
                    break
            else:
                raise RuntimeError(f"a pipeline has at most {SLOTS} instances of its steps")

    @classmethod
    def of_server(cls, pid: int, prefix: str = "") -> list[InFlight]:
        """Return the marks of each pipeline of the server with this process id, to be read.

        `prefix` is the one in the server's environment, if it differs from this process.
        """
        found = []
        name = f"{prefix or _prefix()}in_flight.{FORMAT}.{_identify(pid)}.*"
        for path in sorted(SHARED_MEMORY.glob(name)):
            marks = cls.__new__(cls)
            marks._open(path)
            found.append(marks)
        return found

    def _open(self, path: Path) -> None:
        self.path, self.pipeline = path, path.name.rpartition(".")[2]
        path.touch(0o600)
        marks = SLOTS * MARKS
        with path.open("r+b") as file:
            os.ftruncate(file.fileno(), 8 * (_HEADER + SLOTS * _SLOT + 3 * marks))
            words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._head, words = words[:_HEADER], words[_HEADER:]
        self._slots, words = words[: SLOTS * _SLOT], words[SLOTS * _SLOT :]
        self._numbers, self._times, self._rows = (words[i * marks :][:marks] for i in range(3))

    def admit(self, rows: int) -> Ticket:
        """Set the mark of a request with `rows` model rows.

        Returns:
            The ticket; zeros if all marks of this process are set.
        """
        if not self._free and not self._find_free():
            return Ticket()
        place, number = self._free.pop(), secrets.randbits(62) + 1
        self._times[place], self._rows[place] = time.monotonic_ns(), rows
        self._numbers[place] = number
        return Ticket(place, number)

    def _find_free(self) -> bool:
        first, top = self.slot * MARKS, self._own[_TOP]
        lost_before = self._newest() - self._max_slack()
        places = range(first, first + top)
        self._free = [p for p in places if not self._numbers[p] or self._times[p] < lost_before]
        if len(self._free) < _NEW_MARKS and top < MARKS:
            self._own[_TOP] = top + _NEW_MARKS
            self._free += range(first + top, first + top + _NEW_MARKS)
        return bool(self._free)

    def is_set(self, ticket: Sequence[int]) -> bool:
        """Whether the mark of this ticket is set: the request is not answered yet."""
        place, number = ticket
        return number > 0 and 0 <= place < len(self._numbers) and self._numbers[place] == number

    def done(self, ticket: Sequence[int]) -> None:
        """Clear the mark of an answered request, unless it is cleared, and keep the time."""
        if self.is_set(ticket):
            place, own, now = ticket[0], self._own, time.monotonic_ns()
            sent_at, self._times[place] = self._times[place], now
            self._numbers[place] = 0
            own[_LONGEST] = max(own[_LONGEST], now - sent_at)
            own[_NEWEST] = max(own[_NEWEST], sent_at)
            own[_DONE_AT] = now

    def answered_at(self, ticket: Ticket) -> float:
        """Return when the request of a cleared mark was answered, by `time.monotonic`."""
        return self._times[ticket.place] / 1e9

    def answered(self) -> AnswerTimes:
        return AnswerTimes(max(self._words(_DONE_AT)) / 1e9, self._newest() / 1e9)

    def wait(self, requests: int, rows: int) -> None:
        """Add to the requests and rows of this process that are not in the core."""
        self._own[_WAITING] += requests
        self._own[_WAITING_ROWS] += rows

    def waiting(self) -> tuple[int, int]:
        """Return how many requests and rows of all processes are not in the core."""
        return sum(self._words(_WAITING)), sum(self._words(_WAITING_ROWS))

    def in_core(self, slack_s: float = 0.0) -> tuple[int, int]:
        """Return how many requests and rows are in the core and behind it.

        A request is lost if one that was handed over more than `slack_s` later is answered.
        """
        oldest = self._newest() - int(1e9 * slack_s)
        requests = all_rows = 0
        for slot, top in enumerate(self._words(_TOP)):
            first = slot * MARKS
            for place, number in enumerate(self._numbers[first : first + top].tolist(), first):
                if number and self._times[place] >= oldest:
                    requests, all_rows = requests + 1, all_rows + self._rows[place]
        return requests, all_rows

    def requests(self) -> int:
        """Return the number of requests in flight, without those that are certainly lost."""
        return self.waiting()[0] + self.in_core(self._max_slack() / 1e9)[0]

    def acknowledge(self, slot: int, number: int) -> None:
        """Note that the chunks of a generation core have arrived up to `number`."""
        self._slots[slot * _SLOT + _ACKNOWLEDGED] = number

    def acknowledged(self) -> int:
        """Return the number of the last chunk of this process that has arrived, or 0."""
        return self._own[_ACKNOWLEDGED]

    def stop_admitting(self) -> None:
        """Make preprocess reject all further requests."""
        self._head[_CLOSED_AT] = time.monotonic_ns()

    @property
    def closed_at(self) -> float:
        """Time of `stop_admitting`, by `time.monotonic`; 0 before."""
        return self._head[_CLOSED_AT] / 1e9

    def _words(self, word: int) -> Sequence[int]:
        """Return the same word of all slots in use."""
        return self._slots[word : (self._head[_USED] or 1) * _SLOT : _SLOT].tolist()

    def _newest(self) -> int:
        return max(self._words(_NEWEST))

    def _max_slack(self) -> int:
        """Return the maximum nanoseconds by which a request overtakes another one."""
        is_parallel = self._head[_CORES] > 1
        return int(1e9 * REORDER_S) + is_parallel * 2 * max(self._words(_LONGEST))


def _prefix() -> str:
    return os.environ.get(PREFIX_VARIABLE, "triptych_")


def _namespace() -> int:
    """Return the number of the PID namespace: containers may share /dev/shm but not process ids."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _identify(pid: int) -> str:
    """Return the namespace of a process id, the id and its start time, because ids are reused."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "dead"
    return f"{_namespace()}-{pid}-{started}"
