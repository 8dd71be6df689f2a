"""Records become the journal's entries: every field, nobody else's, and never a wait."""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_pin.records import history
from kata_pin.records.history import MAX_MESSAGE, MAX_VALUE, JournalHandler, about, encode


def decoded(data: bytes) -> list[tuple[str, bytes]]:
    """Read an entry as journald does (systemd.io/JOURNAL_NATIVE_PROTOCOL)."""
    fields = []
    while data:
        line, _, rest = data.partition(b"\n")
        if b"=" in line:
            name, _, value = line.partition(b"=")
        else:
            name = line
            (length,) = struct.unpack("<Q", rest[:8])
            value, rest = rest[8 : 8 + length], rest[8 + length :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        fields.append((name.decode(), value))
        data = rest
    return fields


class Kept(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Listening:
    """A journal's socket of our own, and a logger that sends to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(5)
        self.fallback = Kept()
        self.handler = JournalHandler(str(path), fallback=self.fallback)
        self.log = logging.Logger("kata_pin.test")  # noqa: LOG001 - nobody else's
        self.log.addHandler(self.handler)

    def entry(self) -> dict[str, str]:
        """Return the next entry; no field may come twice."""
        fields = decoded(self.socket.recv(1 << 20))
        assert len(dict(fields)) == len(fields)
        return {name: value.decode() for name, value in fields}


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    """Yield a socket and its logger."""
    one = Listening(tmp_path / "journal")
    yield one
    one.handler.close()
    one.socket.close()


def test_a_record_is_an_entry_with_its_fields(listening: Listening) -> None:
    """Message, priority and logger; the sandbox and the container that the message names."""
    listening.log.warning(
        "sandbox %s: %d%% of container %s", "abc", 5, "web", extra=about("1234", source="audit")
    )
    assert listening.entry() == {
        "MESSAGE": "sandbox abc: 5% of container web",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "kata-pin",
        "LOGGER": "kata_pin.test",
        "SANDBOX": "abc",
        "CONTAINER": "web",
        "MESSAGE_ID": "1234",
        "SOURCE": "audit",
    }


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("nothing to say", ()),
        ("no sandbox %d", (5,)),
        ("mapping %(a)s", ({"a": "b"},)),
        ("100%", ()),
    ],
)
def test_records_about_nothing_in_particular(
    listening: Listening, message: str, arguments: tuple[object, ...]
) -> None:
    """A field is there only where the word before a placeholder says so."""
    listening.log.error(message, *arguments)
    entry = listening.entry()
    assert entry["PRIORITY"] == "3"
    assert set(entry) - {"SANDBOX"} == {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "LOGGER"}
    assert ("SANDBOX" in entry) == ("sandbox %" in message)


def test_a_newline_makes_no_field(listening: Listening) -> None:
    """A hostile pod name stays within its value, in the protocol's binary form."""
    hostile = "x\nPRIORITY=0\nSANDBOX=other\n\n_UID=0"
    listening.log.info("sandbox %s", hostile)
    entry = listening.entry()
    assert entry["SANDBOX"] == hostile
    assert entry["MESSAGE"] == f"sandbox {hostile}"
    assert entry["PRIORITY"] == "6"
    assert len(entry) == 5


def test_a_traceback_is_one_entry(listening: Listening) -> None:
    """Many lines, one message."""
    try:
        raise ValueError("seen")
    except ValueError:
        listening.log.exception("failed")
    message = listening.entry()["MESSAGE"]
    assert message.startswith("failed\nTraceback")
    assert message.endswith("ValueError: seen")


def test_values_are_bounded(listening: Listening) -> None:
    """What is too long is cut, so that a datagram always fits; no character is cut in two."""
    listening.log.info("sandbox %s", "\N{SNOWMAN}" * 100_000)
    entry = listening.entry()
    assert MAX_MESSAGE - 3 < len(entry["MESSAGE"].encode()) <= MAX_MESSAGE
    assert MAX_VALUE - 3 < len(entry["SANDBOX"].encode()) <= MAX_VALUE


@given(st.dictionaries(st.sampled_from(("MESSAGE", "SANDBOX", "_X9")), st.text(max_size=200)))
def test_what_is_written_is_what_is_read(fields: dict[str, str]) -> None:
    """Any text comes back as it was, half a surrogate pair as its escape."""
    read = {name: value.decode() for name, value in decoded(encode(fields))}
    expected = {n: v.encode("utf-8", "backslashreplace").decode() for n, v in fields.items()}
    assert read == expected


def test_without_a_journal_lines_go_where_they_went(listening: Listening) -> None:
    """It is being restarted: the fallback has the record, and the next one is an entry again."""
    listening.socket.close()
    listening.path.unlink()
    listening.log.info("one")
    assert [record.msg for record in listening.fallback.records] == ["one"]
    listening.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.socket.bind(str(listening.path))
    listening.log.info("two")
    assert listening.entry()["MESSAGE"] == "two"


def test_a_journal_that_takes_nothing_holds_nobody_up(listening: Listening) -> None:
    """What it had no room for is counted, and told with the next entry that it takes."""
    for _ in range(2000):
        listening.log.info("x" * 1000)
    taken = 0
    listening.socket.setblocking(False)
    try:
        while True:
            listening.socket.recv(1 << 20)
            taken += 1
    except BlockingIOError:
        listening.socket.settimeout(5)
    assert 0 < taken < 2000
    listening.log.info("room again")
    assert listening.entry()["LOST_BEFORE"] == str(2000 - taken)
    listening.log.info("nothing more")
    assert "LOST_BEFORE" not in listening.entry()


_PROGRAM = """
import logging, os, sys
from kata_pin.service.process import set_up
status = os.fstat(2)
stream = {"no": "", "ours": f"{status.st_dev}:{status.st_ino}", "other": "1:2"}[sys.argv[1]]
set_up("info", {"JOURNAL_STREAM": stream}, journal=sys.argv[2])
log = logging.getLogger("kata_pin.x")
try:
    raise OSError("gone")
except OSError:
    log.info("sandbox %s: x\\n\\x1b[2Kline", "abc", exc_info=len(sys.argv) > 3)
"""


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        ("no", " INFO sandbox abc: x ?[2Kline\n"),
        ("other", " INFO sandbox abc: x ?[2Kline\n"),
        ("ours", "<6>sandbox abc: x ?[2Kline\n"),
    ],
)
def test_what_stderr_is_decides_the_form(tmp_path: Path, stream: str, lines: str) -> None:
    """A terminal has times, the journal's stream priorities where its socket is not to be had.

    Names of others cannot begin a line of their own, nor change what a terminal shows.
    """
    command = [sys.executable, "-c", _PROGRAM, stream, str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr.endswith(lines)
    assert (done.stderr == lines) is (stream == "ours")


def test_each_line_of_a_traceback_has_the_priority(tmp_path: Path) -> None:
    """The journal would take a line without one for another entry."""
    command = [sys.executable, "-c", _PROGRAM, "ours", str(tmp_path / "none"), "traceback"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    lines = done.stderr.splitlines()
    assert len(lines) > 3
    assert all(one.startswith("<6>") for one in lines)
    assert lines[-1] == "<6>OSError: gone"


def test_the_journals_own_stream_gets_entries(listening: Listening) -> None:
    """Nothing is written to standard error then."""
    command = [sys.executable, "-c", _PROGRAM, "ours", str(listening.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
    entry = listening.entry()
    assert (entry["SANDBOX"], entry["MESSAGE"]) == ("abc", "sandbox abc: x ?[2Kline")


def test_message_ids_are_ids() -> None:
    """128 bits each, none twice."""
    names = (
        "STARTED", "SANDBOX_OVER", "DRIFT_FOUND", "PASS_FAILED", "VMM_CLAIMED", "PROCESS_HUNG",
    )  # fmt: skip
    ids = [*(getattr(history, name) for name in names), *history.MESSAGE_IDS.values()]
    assert len({int(one, 16) for one in ids if len(one) == 32}) == len(ids)
    text = (Path(__file__).parents[3] / "docs/logs.md").read_text()
    assert all(one in text for one in ids)
