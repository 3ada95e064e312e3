"""The store: what was written is read as it was, or is missing."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from jinfercept.errors import ConfigError
from jinfercept.kv import disk as store_module
from jinfercept.kv.disk import LOCK_NAME, DiskStore, Root
from tests.kv.disk.pages import PAGE_BYTES, ROOT, abandon, kv_of, read_pages, tokens_of, write_pages

SPACE = 40 * PAGE_BYTES

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where a restart takes no time, since nothing waits for a disk."""

runs_of_pages = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tokens_of)


class StoreMachine(RuleBasedStateMachine):
    """Conversations that branch, in a space too small for all, with restarts and kills."""

    texts: Any = Bundle("texts")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.store = DiskStore(self.folder / "kv", SPACE)
        self.readers: list[tuple[bytes, Any]] = []

    @rule(target=texts, tokens=runs_of_pages)
    def begin(self, tokens: bytes) -> bytes:
        write_pages(self.store, tokens)
        return tokens

    @rule(target=texts, tokens=texts, more=runs_of_pages)
    def go_on(self, tokens: bytes, more: bytes) -> bytes:
        stored = len(self.store.find(ROOT, tokens + more))
        write_pages(self.store, tokens + more, first=stored)
        return tokens + more

    @rule(tokens=texts)
    def read(self, tokens: bytes) -> None:
        stored = len(self.store.find(ROOT, tokens))
        assert read_pages(self.store, tokens) == stored

    @rule(tokens=texts)
    def begin_to_read(self, tokens: bytes) -> None:
        self.readers.append((tokens, self.store.find(ROOT, tokens)))

    @rule()
    def end_reading(self) -> None:
        for tokens, names in self.readers:
            buffers = [bytearray(PAGE_BYTES) for _ in names]
            num_right = self.store.read(names, [(memoryview(buffer),) for buffer in buffers])
            assert buffers[:num_right] == kv_of(tokens)[:num_right]
        self.readers.clear()

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool) -> None:
        self.end_reading()
        before = self.store.occupancy().num_pages
        abandon(self.store) if is_killed else self.store.close()
        self.store = DiskStore(self.folder / "kv", SPACE)
        assert self.store.occupancy().num_pages == before

    @invariant()
    def is_consistent(self) -> None:
        self.store.check()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_or_a_shorter_file_costs_pages_and_never_gives_wrong_ones(data: st.DataObject) -> None:
    texts = [tokens_of(range(9)), tokens_of([0, 1, 2, 30, 31]), tokens_of([50, 51])]
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        store = DiskStore(Path(folder), SPACE)
        assert [write_pages(store, tokens) for tokens in texts] == [9, 5, 2]
        store.close()
        paths = sorted(
            (path for path in Path(folder).iterdir() if path.name != LOCK_NAME), key=lambda path: path.stat().st_size
        )
        path = data.draw(st.sampled_from(paths))
        content = bytearray(path.read_bytes())
        place = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(content))
        if data.draw(st.booleans()):
            content[place] ^= data.draw(st.integers(1, 255))
        else:
            del content[place:]
        path.write_bytes(content)
        store = DiskStore(Path(folder), SPACE)
        for tokens in texts:
            read_pages(store, tokens)
            assert write_pages(store, tokens) == len(tokens) // 4
            assert read_pages(store, tokens) == len(tokens) // 4
        store.check()
        store.close()


class Killed(BaseException):
    """Stands for the end of the process."""


@settings(max_examples=25, deadline=None)
@given(write=st.integers(0, 40), share=st.floats(0, 1))
def test_a_kill_in_the_middle_of_any_write_costs_what_was_being_written(write: int, share: float) -> None:
    left = write

    def pwritev(file: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal left
        left -= 1
        if left >= 0:
            return os_pwritev(file, views, offset)
        os_pwritev(file, [view[: int(share * len(view))] for view in views], offset)
        raise Killed

    texts = [tokens_of([number, *range(12)]) for number in range(6)]
    os_pwritev = os.pwritev
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder, pytest.MonkeyPatch.context() as patch:
        store = DiskStore(Path(folder), SPACE)
        patch.setattr(store_module.os, "pwritev", pwritev)
        try:
            for tokens in texts:
                write_pages(store, tokens)
        except Killed:
            pass
        patch.undo()
        abandon(store)
        store = DiskStore(Path(folder), SPACE)
        assert sum(read_pages(store, tokens) for tokens in texts) >= min(write, 27)
        assert store.counters.damaged_pages == 0
        store.check()
        store.close()


WRITER = """
import sys
from pathlib import Path
from jinfercept.kv.disk import DiskStore
from tests.kv.disk.pages import tokens_of, write_pages
store = DiskStore(Path(sys.argv[1]), int(sys.argv[2]))
for number in range(10**9):
    write_pages(store, tokens_of([number % 7, *range(number % 11)]))
    print(number, flush=True)
"""


def test_after_a_kill_the_pages_that_were_written_are_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "kv"), str(SPACE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line == "60\n":
                break
        process.send_signal(signal.SIGKILL)
    store = DiskStore(tmp_path / "kv", SPACE)
    pages = [read_pages(store, tokens_of([number, *range(10)])) for number in range(7)]
    assert sum(pages) > 20
    assert store.counters.damaged_pages == 0
    store.check()
    store.close()


def test_pages_whose_space_is_used_again_before_they_are_read_are_missing_and_not_damaged(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SPACE)
    first = tokens_of(range(20))
    write_pages(store, first)
    names = store.find(ROOT, first)
    assert write_pages(store, tokens_of(range(100, 130))) == 30
    buffers = [bytearray(PAGE_BYTES) for _ in names]
    assert store.read(names, [(memoryview(buffer),) for buffer in buffers]) == 10
    assert buffers[:10] == kv_of(first)[:10]
    assert store.counters.damaged_pages == 0
    store.check()
    store.close()


def test_a_context_larger_than_the_space_keeps_its_beginning(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SPACE)
    tokens = tokens_of(range(50))
    assert write_pages(store, tokens) == read_pages(store, tokens) == 40
    assert write_pages(store, tokens, first=40) == 0
    assert read_pages(store, tokens) == 40
    store.check()
    store.close()


def test_pages_of_another_model_or_tenant_are_missing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SPACE)
    tokens = tokens_of(range(4))
    write_pages(store, tokens)
    other = Root(b"another model", ROOT.token_bytes)
    assert read_pages(store, tokens, other) == 0
    write_pages(store, tokens, root=other)
    assert read_pages(store, tokens, other) == read_pages(store, tokens) == 4
    store.close()


def test_a_folder_is_private_and_has_one_server_at_a_time(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "new" / "kv", SPACE)
    write_pages(store, tokens_of(range(4)))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "kv").iterdir()} == {0o600}
    assert (tmp_path / "new" / "kv").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match=f"used by another server.*process {os.getpid()}"):
        DiskStore(tmp_path / "new" / "kv", SPACE)
    store.close()
    DiskStore(tmp_path / "new" / "kv", SPACE).close()


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, space, what in (
        (tmp_path, SPACE, "the folder of kv_disk holds files of another program"),
        (tmp_path / "file" / "kv", SPACE, "cannot be written"),
        (tmp_path / "kv", 1 << 60, "more than the disk has free; got 1073741824.00 GiB where"),
        (tmp_path / "kv", 0, "too small"),
    ):
        with pytest.raises(ConfigError, match=what):
            DiskStore(path, space)


def test_a_folder_that_vanishes_ends_the_writing_and_its_pages_are_missing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", SPACE)
    tokens = tokens_of(range(4))
    write_pages(store, tokens)
    shutil.rmtree(tmp_path / "kv")
    assert write_pages(store, tokens_of(range(10, 20))) == 0
    assert "was moved or removed" in store.problem
    assert read_pages(store, tokens) == 0
    store.close()


def test_a_disk_that_is_full_sooner_than_said_makes_the_space_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os_pwritev = os.pwritev

    def full_after_16_files(file: int, views: Sequence[memoryview], offset: int) -> int:
        if len(list(tmp_path.glob("data-*"))) > 16:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return os_pwritev(file, views, offset)

    monkeypatch.setattr(store_module.os, "pwritev", full_after_16_files)
    store = DiskStore(tmp_path, SPACE)
    for number in range(6):
        assert write_pages(store, tokens_of([number, *range(10)])) == 11
        assert read_pages(store, tokens_of([number, *range(10)])) == 11
        store.check()
    assert store.occupancy().total_bytes == 16 * PAGE_BYTES
    assert caplog.text.count("the disk of kv_disk is full") == 1
    store.close()


def test_a_smaller_space_at_the_next_start_gives_room_back(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SPACE)
    texts = [tokens_of([number, *range(10)]) for number in range(3)]
    for tokens in texts:
        write_pages(store, tokens)
    store.close()
    store = DiskStore(tmp_path, 12 * PAGE_BYTES)
    assert len(list(tmp_path.glob("data-*"))) == 12
    assert [read_pages(store, tokens) for tokens in texts] == [0, 1, 11]
    store.check()
    store.close()


def test_what_files_of_another_format_say_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, SPACE)
    write_pages(store, tokens_of(range(4)))
    store.close()
    monkeypatch.setattr("jinfercept.kv.disk.FORMAT", 1)
    store = DiskStore(tmp_path, SPACE)
    assert read_pages(store, tokens_of(range(4))) == 0
    store.close()


def test_several_threads_read_while_another_writes(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SPACE)
    texts = [tokens_of([number, *range(10)]) for number in range(5)]
    ended = threading.Event()
    failures: list[BaseException] = []

    def read_on() -> None:
        try:
            while not ended.is_set():
                for tokens in texts:
                    read_pages(store, tokens)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    for tokens in texts * 3:
        write_pages(store, tokens)
    ended.set()
    for reader in readers:
        reader.join()
    assert not failures
    store.check()
    store.close()
