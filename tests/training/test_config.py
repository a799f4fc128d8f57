import argparse
from dataclasses import asdict, replace

import pytest

from idml.cli import add_options, chosen_options
from idml.training.config import TrainConfig, difference, from_dict


def parse(*arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    add_options(parser)
    return chosen_options(parser.parse_args(arguments))


def test_every_field_is_a_flag():
    config = parse(
        "--data", "glyphs", "--out", "x", "--loss", "contrastive", "--method", "ism", "--ambiguity", "blur", "cutmix",
        "--loss-parameters", "negative_margin=0.7",
        "--image-size", "64", "--bound", "1.5", "--no-freeze-bn", "--strict-data", "--gamma", "3",
    )  # fmt: skip
    assert config == TrainConfig(
        data="glyphs", out="x", loss="contrastive", method="ism", ambiguity=("blur", "cutmix"), image_size=64,
        loss_parameters=("negative_margin=0.7",), bound=1.5, freeze_bn=False, strict_data=True, gamma=3.0,
    )  # fmt: skip


def test_every_flag_says_what_it_is_for():
    parser = argparse.ArgumentParser()
    add_options(parser)
    for action in parser._actions:
        assert action.help, action.dest


def test_a_file_gives_options_and_flags_override_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: glyphs\nout: x\nepochs: 7\nambiguity: [blur]\nlr: 0.002\n")
    config = parse("--config", str(file), "--epochs", "9")
    assert (config.data, config.epochs, config.lr, config.ambiguity) == ("glyphs", 9, 0.002, ("blur",))


@pytest.mark.parametrize(
    ("method", "ambiguity", "kinds", "introspective"),
    [
        ("idml", (), ("mixup",), True),
        ("ism", (), (), True),
        ("mixup", (), ("mixup",), False),
        ("plain", ("blur",), ("blur",), False),
        ("idml", ("cutmix",), ("cutmix",), True),
        ("pel-mixup", ("occlusion",), ("occlusion", "mixup"), False),
    ],
)
def test_methods(method, ambiguity, kinds, introspective):
    config = TrainConfig(data="glyphs", out="x", method=method, ambiguity=ambiguity)
    assert config.kinds == kinds
    assert config.introspective is introspective


@pytest.mark.parametrize(
    ("options", "signal", "hidden"),
    [
        ({}, "ranking", 64),
        ({"method": "mixup"}, "ranking", 64),
        ({"method": "plain", "u_hidden": 0}, "ranking", 0),
        ({"introspection": "none"}, "none", 0),
        ({"method": "idml"}, "none", 0),
        ({"method": "idml", "introspection": "error", "detach": True}, "error", 64),
        ({"method": "pel"}, "none", 0),
        ({"method": "constant", "gamma": 1.0}, "none", 0),
        ({"preset": "paper"}, "none", 0),
        ({"preset": "paper", "method": "plain"}, "none", 0),
    ],
)
def test_what_teaches_u_by_default(options, signal, hidden):
    config = from_dict({"data": "glyphs", "out": "x", **options})
    assert (config.introspection, config.u_hidden) == (signal, hidden)
    assert config.method == options.get("method", "idml" if "preset" in options else "plain")
    assert from_dict(asdict(config)) == config


def test_mixtures_of_a_batch():
    config = TrainConfig(data="glyphs", out="x", method="idml")
    counts = [replace(config, mixtures=share).mixed_images for share in (1.0, 0.5, 0.26, 0.001)]
    assert counts == [120, 60, 31, 1]
    assert replace(config, method="ism").mixed_images == 0


def test_difference_names_what_changed():
    old = TrainConfig(data="glyphs", out="x")
    new = TrainConfig(data="glyphs", out="elsewhere", lr=0.5, workers=2)
    assert difference(old, new) == ["lr: 0.0001 → 0.5"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epoch": 3}, "unknown option 'epoch'; did you mean 'epochs'"),
        ({"method": "idm"}, "unknown method 'idm'; did you mean 'idml'"),
        ({"ambiguity": ["mixupp"]}, "unknown ambiguity 'mixupp'; did you mean 'mixup'"),
        ({"schedule": "cos"}, "did you mean 'cosine'"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 2.5}, "epochs must be a whole number"),
        ({"lr": 0}, "lr must be a number above 0"),
        ({"lr": float("nan")}, "lr must be a number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"gamma": -1}, "gamma must be a number of at least 0"),
        ({"holdout": 1.0}, "holdout must be below 1"),
        ({"batch_size": 10, "per_class": 4}, "batch_size 10 is not a multiple of per_class 4"),
        ({"mixtures": 0}, "mixtures must be a number above 0"),
        ({"mixtures": 1.5}, "mixtures must be at most 1, one for each image, got 1.5"),
        ({"mixtures": 0.5, "method": "ism"}, "mixtures is for runs that mix images, which method ism does not"),
        (
            {"fit": True, "method": "mixup"},
            "fit divides what the rule similar softens, which method mixup",
        ),
        ({"fit": True, "rule": "dissimilar"}, "fit divides what the rule similar softens"),
        ({"fit": 1}, "fit must be true or false"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        from_dict({"data": "glyphs", "out": "x", **options})


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(ValueError, match="option 'out' is missing"):
        from_dict({"data": "glyphs"})
    with pytest.raises(FileNotFoundError, match="there is no file"):
        parse("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="must hold options"):
        parse("--config", str(tmp_path / "list.yaml"))
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(ValueError, match="not a YAML file"):
        parse("--config", str(tmp_path / "bad.yaml"))


def test_presets_and_what_overrides_them(tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    add_options(parser)

    def chosen(*flags):
        return chosen_options(parser.parse_args(["--out", "x", *flags]))

    paper = chosen("--data", "cub:x", "--preset", "paper")
    assert (paper.trunk, paper.image_size, paper.batch_size, paper.epochs) == ("resnet50", 224, 120, 60)
    assert (paper.lr, paper.step_epochs, paper.step_factor, paper.warmup_epochs) == (6e-4, 5, 0.5, 5)
    assert (paper.tau, paper.gamma, paper.rule, paper.labels) == (5.0, 0.0, "similar", "sets")
    cars = chosen("--data", "cars:x", "--preset", "paper")
    assert (cars.lr, cars.step_epochs, cars.gamma) == (2.5e-4, 10, 3.0)
    sop = chosen("--data", "sop:x", "--preset", "paper")
    assert (sop.lr, sop.step_epochs, sop.step_factor, sop.gamma) == (6e-4, 10, 0.25, 0.0)
    assert chosen("--data", "cub:x", "--preset", "paper", "--lr", "1e-5").lr == 1e-5
    release = chosen("--data", "cub:x", "--preset", "release")
    assert (release.rule, release.gamma, release.labels, release.loss) == ("release", 4.0, "weighted", "proxy_anchor")
    file = tmp_path / "mine.yaml"
    file.write_text("preset: paper\nepochs: 3\n")
    assert chosen("--data", "cub:x", "--config", str(file)).epochs == 3
    assert chosen("--data", "cub:x", "--config", str(file)).trunk == "resnet50"
    with pytest.raises(ValueError, match="unknown preset 'papre'; did you mean 'paper'"):
        chosen("--data", "cub:x", "--preset", "papre")
