"""The spool: whole frames or nothing, whatever killed the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.inbox import HEADER, UNSYNCED_FILES, Inbox, SpoolError, cut_torn_tail, frames
from tests.processes import open_files


def test_what_is_appended_can_be_read_after_reopening(tmp_path):
    inbox = Inbox(tmp_path, 1)
    places = [inbox.append(data) for data in (b"one", b"", b"three" * 1000)]
    again = Inbox(tmp_path, 2)
    assert again.cut_bytes == 0
    assert [again.read(place) for place in places] == [b"one", b"", b"three" * 1000]
    assert again.append(b"four")[0] != places[0][0]  # nobody writes behind a predecessor


@given(st.integers(1, 200))
def test_a_torn_tail_is_cut_at_the_last_whole_frame(tmp_path_factory, lost):
    """Frames of 12 + 10, 12 + 0 and 12 + 90 bytes; the last `lost` bytes never reached the file."""
    folder = tmp_path_factory.mktemp("spool")
    inbox = Inbox(folder, 1)
    payloads = [b"a" * 10, b"", b"b" * 90]
    places = [inbox.append(payload) for payload in payloads]
    path = folder / places[0][0]
    size = path.stat().st_size
    assert size == 3 * HEADER.size + 100
    os.truncate(path, max(0, size - lost))
    ends = [at + HEADER.size + len(payload) for (_, at), payload in zip(places, payloads, strict=True)]
    whole = [i for i, end in enumerate(ends) if end <= size - lost]
    again = Inbox(folder, 2)
    assert [payload for _, payload in frames(path)] == [payloads[i] for i in whole]
    assert path.stat().st_size == max([0, *(ends[i] for i in whole)])
    for i, place in enumerate(places):
        if i in whole:
            assert again.read(place) == payloads[i]
        else:
            with pytest.raises(SpoolError):
                again.read(place)


def test_a_last_frame_with_wrong_bytes_is_cut(tmp_path):
    inbox = Inbox(tmp_path, 1)
    first, second = inbox.append(b"first"), inbox.append(b"second")
    path = tmp_path / first[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cut_torn_tail(path) == HEADER.size + len(b"second")
    assert Inbox(tmp_path, 2).read(first) == b"first"
    with pytest.raises(SpoolError):
        Inbox(tmp_path, 3).read(second)


def test_files_rotate_and_go_when_nobody_needs_them(tmp_path):
    inbox = Inbox(tmp_path, 1, rotate_bytes=50)
    names = [inbox.append(b"x" * 30)[0] for _ in range(5)]
    assert names == ["0001-000000.spool"] * 2 + ["0001-000001.spool"] * 2 + ["0001-000002.spool"]
    assert inbox.keep_only([names[2]]) == [names[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[2], names[4]]  # the open file stays
    inbox.rotate()
    assert inbox.append(b"y")[0] == "0001-000003.spool"
    with pytest.raises(SpoolError, match=r"0001-000000\.spool"):
        inbox.read((names[0], 0))


def test_files_of_the_newest_checkpoints_stay(tmp_path):
    inbox = Inbox(tmp_path, 1, checkpoints=2, rotate_bytes=1)
    names = [inbox.append(b"x")[0] for _ in range(5)]
    for name in names[:3]:
        inbox.committed([name])
    assert inbox.keep_only([]) == [names[0], names[3]]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files, which Linux alone shows")
def test_full_files_are_open_until_they_are_on_the_disk_and_not_many_at_once(tmp_path):
    inbox = Inbox(tmp_path, 1, rotate_bytes=1)
    most = 0
    for _ in range(2 * UNSYNCED_FILES):
        inbox.append(b"x")
        most = max(most, open_files(tmp_path))
    assert most == UNSYNCED_FILES + 1  # and the one for appending
    inbox.sync()
    assert open_files(tmp_path) == 1
    inbox.rotate()
    inbox.sync()
    assert open_files(tmp_path) == 0


def test_refused_messages_are_kept_apart(tmp_path):
    inbox = Inbox(tmp_path, 1)
    inbox.quarantine(b"bad")
    Inbox(tmp_path, 2).quarantine(b"worse")
    assert [payload for _, payload in frames(tmp_path / "quarantine")] == [b"bad", b"worse"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from learner.inbox import Inbox
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
inbox = Inbox(Path(sys.argv[1]), 1)
first = inbox.append(b"a" * 40)
try:
    inbox.append(b"b" * 40)
except OSError:
    print("refused")
print(inbox.append(b"c" * 20), flush=True)
"""


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    """100 bytes in all: 52 for the first frame; 52 more do not fit, 32 do, at the same place."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["refused", "('0001-000000.spool', 52)"]
    path = tmp_path / "0001-000000.spool"
    assert [payload for _, payload in frames(path)] == [b"a" * 40, b"c" * 20]
    assert path.stat().st_size == 52 + 32


WRITER = """
import sys
from pathlib import Path
from learner.inbox import Inbox
inbox = Inbox(Path(sys.argv[1]), 1)
for i in range(10**9):
    inbox.append(b"%d" % i * 5000)
    print(i, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 50:
            break
    writer.send_signal(signal.SIGKILL)
    acknowledged = int((["50", *writer.stdout.read().split()])[-1])
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    Inbox(tmp_path, 2)
    found = [payload for path in sorted(tmp_path.glob("*.spool")) for _, payload in frames(path)]
    assert found == [b"%d" % i * 5000 for i in range(len(found))]
    assert len(found) >= acknowledged + 1
