"""Two processes give the loss and the gradients that one gives with the same batch."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from idml import compat
from idml.training import loop
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.loop import train
from method_cases import COMPARATORS, PAPER, case, losses_of

ONE_STEP = """
import json, sys, torch
torch.set_num_threads(1)
from safetensors.torch import save_file
from idml.data.sampling import random_stream
from idml.training.build import build
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.step import compute_gradients

processes = Processes()
assert processes.count == int(sys.argv[2]), processes.count
images = torch.rand(16, 3, 16, 16, generator=random_stream("images"))
labels = torch.arange(16) % 4
for case in json.loads(sys.argv[3]):
    torch.manual_seed(0)
    options = {"trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, **case}
    config = from_dict({"data": "glyphs", "out": "-", **options})
    model, method = build(config, labels, 4)
    model.trunk.eval()  # statistics of its own share would differ from those of the whole batch
    batch = method.add_images(images, labels, seed=0, epoch=0, step=0)
    terms, embeddings = compute_gradients(batch, torch.arange(16), model, method, config, processes, seed=5)
    if processes.first:
        parameters = [*model.named_parameters(), *method.named_parameters()]
        found = {k: p.grad.contiguous() for k, p in parameters if p.grad is not None}
        found |= {**{k: torch.tensor(v) for k, v in terms.items()}, "level": embeddings.level}
        save_file(found, f"{sys.argv[1]}-{case['loss']}-{case['method']}")
"""
CASES = [(method, loss) for method in PAPER for loss in ("multi_similarity", "proxy_anchor", "margin_dw")]
CASES += [("plain", "ranked_list"), *((method, losses_of(method)[-1]) for method in COMPARATORS)]


def run(code, *arguments, processes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{code}\nfrom idml.training.distributed import end_process\nend_process(0)\n")
    launch = [sys.executable, str(script)]
    if processes > 1:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            str(script),
        ]
    return subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Where one step of one process and of two are kept."""
    folder = tmp_path_factory.mktemp("steps")
    cases = json.dumps([case(*each) for each in CASES])
    for processes in (1, 2):
        arguments = [str(folder / str(processes)), str(processes), cases]
        done = run(ONE_STEP, *arguments, processes=processes, tmp_path=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("method", "loss"), CASES)
def test_two_processes_give_the_loss_and_gradients_of_one(steps, loss, method):
    one, two = (load_file(steps / f"{processes}-{loss}-{method}") for processes in (1, 2))
    assert one.keys() == two.keys()
    assert any(name.endswith("proxies") for name in one) is (loss == "proxy_anchor")
    assert "uncertainty.linear.weight" in one
    assert any(float(g.abs().max()) > 0 for k, g in one.items() if k.startswith("trunk"))
    for name, expected in one.items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(
            two[name], expected, rtol=1e-4, atol=1e-6 + 1e-5 * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_a_whole_run_in_two_processes(options, tmp_path):
    code = """
import sys, torch
torch.set_num_threads(1)
from idml.cli import main
sys.exit(main(sys.argv[1:]))
"""
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in options.items() if k not in ("pretrained", "epochs")]
    flags = [
        "train",
        *flags,
        "--no-pretrained",
        "--epochs=2",
        "--loss=proxy_anchor",
        "--json",
        f"--out={tmp_path / 'run'}",
    ]
    done = run(code, *flags, processes=2, tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1  # the first process alone reports
    assert json.loads(lines[0]) == json.loads((tmp_path / "run" / "metrics.json").read_text())
    logged = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged if "loss" in row] == list(
        range(1, len([r for r in logged if "loss" in r]) + 1)
    )


def test_shares_cover_the_batch():
    processes = Processes()
    processes.count = 3
    rows = torch.arange(12)
    shares = []
    for processes.rank in range(3):
        shares.append(processes.share(rows))
    assert torch.equal(torch.stack(shares, dim=1).flatten(), rows)
    with pytest.raises(ValueError, match="batch_size 8 is not a multiple of the 3 processes"):
        processes.check_shares(8, 9)
    with pytest.raises(
        ValueError, match="the number of images added to a batch, 8 is not a multiple of the 3 processes"
    ):
        processes.check_shares(9, 8)
    processes.check_shares(9, 3)


def test_bfloat16_trains_where_the_processor_has_it(options, tmp_path):
    config = from_dict({"out": str(tmp_path), "precision": "bfloat16", **options})
    if torch.cuda.is_available() or compat.cpu_computes_bfloat16():
        assert train(config)["steps"] > 0
    else:
        with pytest.raises(ValueError, match="this CPU cannot compute in it; use float32"):
            train(config)


def test_bfloat16_is_refused_where_it_crashes(options, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loop, "cpu_computes_bfloat16", lambda: False)
    with pytest.raises(ValueError, match="precision bfloat16: this CPU cannot compute in it; use float32"):
        train(from_dict({"out": str(tmp_path / "run"), "precision": "bfloat16", **options}))
    assert not (tmp_path / "run").exists()
