"""Atomic writes and locks."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from idml.files import lock_file, sync_folder, write_atomic


def test_an_atomic_write_replaces_the_file_and_leaves_no_other(tmp_path):
    write_atomic(tmp_path / "a", b"old")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_what_a_kill_left_does_not_become_part_of_the_file(tmp_path):
    (tmp_path / ".a.part").write_bytes(b"longer than the new content")
    write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a", b"old")

    def full(file):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_atomic(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_several_writers_of_one_file(tmp_path, monkeypatch):
    """Each publishes its own content as a whole, whoever else writes the same file at that moment."""
    monkeypatch.setattr(os, "fsync", lambda file: time.sleep(0.001))  # the others run
    contents = [bytes([number]) * 100_000 for number in range(4)]
    write_atomic(tmp_path / "a", contents[0])
    seen, wrong = set(), []

    def write(content):
        try:
            for _ in range(20):
                write_atomic(tmp_path / "a", content)
                seen.add((tmp_path / "a").read_bytes())
        except OSError as error:
            wrong.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen <= set(contents)
    assert os.listdir(tmp_path) == ["a"]


def test_file_and_folder_are_forced_to_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    write_atomic(tmp_path / "a", b"x")
    assert [os.path.basename(path) for path in synced] == [".a.part", tmp_path.name]


def test_a_drive_that_cannot_sync_folders_is_passed_over_but_a_broken_one_is_not(tmp_path, monkeypatch):
    def fail(number):
        def fsync(file):
            raise OSError(number, "failed")

        return fsync

    monkeypatch.setattr(os, "fsync", fail(22))  # EINVAL
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail(5))  # EIO
    with pytest.raises(OSError, match="failed"):
        sync_folder(tmp_path)


def test_a_lock_has_one_holder(tmp_path):
    with lock_file(tmp_path / "lock"), pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock", wait=False)
    lock_file(tmp_path / "lock", wait=False).close()


def test_a_lock_keeps_the_content_of_its_file(tmp_path):
    (tmp_path / "data").write_bytes(b"content")
    with lock_file(tmp_path / "data") as file:
        assert file.read() == b"content"


def test_a_second_process_waits_for_the_lock(tmp_path):
    code = "from pathlib import Path; from idml.files import lock_file; print('asks', flush=True); "
    code += f"lock_file(Path({str(tmp_path / 'lock')!r}))"
    with lock_file(tmp_path / "lock"):
        waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert waiting.stdout.readline() == b"asks\n"
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
    assert waiting.wait(600) == 0
    waiting.stdout.close()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = lock_file(tmp_path / "lock")
    child = os.fork()
    if child == 0:
        time.sleep(1000)
        os._exit(0)
    try:
        lock.close()
        for _ in range(6000):  # the child closes its copy as soon as it runs
            try:
                lock_file(tmp_path / "lock", wait=False).close()
                break
            except BlockingIOError:
                time.sleep(0.05)
        else:
            pytest.fail("the child still holds the lock")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
