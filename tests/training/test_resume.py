"""SIGKILL to the real process at any moment, --resume, and the weights are those of an uninterrupted run."""

import os
import random
import signal
import time

import pytest
from children import run, start
from safetensors.torch import load_file

from idml.training.checkpoint import lock_run
from idml.training.config import from_dict
from idml.training.loop import Interrupted, train
from idml.training.run_log import stop_on_sigterm

KILLS = int(os.environ.get("IDML_KILLS", "2"))  # more in `make faults`


def command(options, out, *more):
    flags = []
    for key, value in options.items():
        name = key.replace("_", "-")
        flags += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", value]
    return ["train", "--out", out, *flags, *more]


def final(out):
    """Every tensor of the last checkpoint, and the bytes of the selected model."""
    tensors = load_file(out / "checkpoints" / "last.safetensors")
    return {k: v.numpy().tobytes() for k, v in tensors.items()}, (out / "model.safetensors").read_bytes()


def resume_if_begun(out):
    """--resume without a run is an error."""
    return ["--resume"] if out.exists() else []


def steps_logged(out):
    try:
        return (out / "log.jsonl").read_text().count('"loss"')
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_and_resumed_is_bit_identical(options, tmp_path, workers):
    options = {**options, "epochs": 4, "workers": workers, "loss": "proxy_anchor"}
    whole = tmp_path / "whole"
    assert run(command(options, whole)) == 0
    chance = random.Random(workers)
    torn, kills = tmp_path / "torn", 0
    total = steps_logged(whole)
    for target in sorted(chance.sample(range(1, total), min(KILLS, total - 1))):
        process = start(command(options, torn, *resume_if_begun(torn)))
        while process.is_alive() and steps_logged(torn) < target:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.03)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
    assert kills >= 1
    assert run(command(options, torn, "--resume", "--json"), said=tmp_path / "said") == 0, (
        tmp_path / "said"
    ).read_text()
    assert final(torn) == final(whole)
    assert steps_logged(torn) == total
    assert not list(torn.rglob("*.part"))


def test_killed_inside_a_checkpoint_write(options, tmp_path):
    """The process dies between writing the temporary file and renaming it, at every checkpoint in turn."""
    options = {**options, "epochs": 2}
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    assert run(command(options, whole)) == 0
    for n in (1, 2):
        assert run(command(options, torn, *resume_if_begun(torn)), torn=n) == -signal.SIGKILL
    assert run(command(options, torn, "--resume")) == 0
    assert final(torn) == final(whole)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_sigterm_at_any_step_loses_no_validation(options, tmp_path, at):
    """Also at the last step of an epoch (the third), whose validation then still has to come."""
    options = {**options, "epochs": 3}
    train(from_dict({"out": str(tmp_path / "whole"), **options}))

    def stop(row):
        if row.get("step") == at and "loss" in row:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(from_dict({"out": str(tmp_path / "torn"), **options}), report=stop)
    train(from_dict({"out": str(tmp_path / "torn"), **options}), resume=True)
    assert final(tmp_path / "torn") == final(tmp_path / "whole")
    logs = [(tmp_path / run / "log.jsonl").read_text().count("held_out_map@r") for run in ("whole", "torn")]
    assert logs == [3, 3]


def test_sigterm_during_the_last_test_ends_what_comes_after_the_run(options, tmp_path):
    """A worker that makes a table must not begin its next run."""
    arrived = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    try:
        config = from_dict({"out": str(tmp_path / "run"), **options})
        train(config, tested=lambda embeddings: os.kill(os.getpid(), signal.SIGTERM))
        assert arrived == [signal.SIGTERM]
        assert (tmp_path / "run" / "metrics.json").exists()
        with stop_on_sigterm() as asked:
            pass
        assert not asked()
        assert len(arrived) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_child_does_not_hold_the_run(tmp_path):
    lock = lock_run(tmp_path)
    running, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"x")
        time.sleep(1000)
        os._exit(0)
    try:
        assert os.read(running, 1) == b"x"  # the child lets go before it runs
        lock.close()
        lock_run(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_sigterm_writes_a_checkpoint_and_exits(options, tmp_path):
    options = {**options, "epochs": 200, "checkpoint_every": 10_000}
    process = start(command(options, tmp_path / "run"), said=tmp_path / "said")
    while steps_logged(tmp_path / "run") < 1:
        assert process.is_alive()
        time.sleep(0.01)
    process.terminate()
    process.join(600)
    assert process.exitcode == 143
    assert "continue with --resume" in (tmp_path / "said").read_text()
    assert (tmp_path / "run" / "checkpoints" / "last.safetensors").exists()
