import argparse
import re

import pytest

from idml.cli import main
from idml.cli_train import GROUPS, SPECS, TRUNKS, add_method_options, add_options, chosen_options
from idml.losses import LOSSES
from idml.methods import METHODS
from idml.training.config import PRESETS, TrainConfig, common_options, from_dict, list_differences, preset, to_dict


def training_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="a file")
    add_options(parser)
    add_method_options(parser)
    return parser


def parse(*arguments):
    return chosen_options(training_parser().parse_args(arguments))


def test_every_option_is_a_flag():
    config = parse(
        "--data", "glyphs", "--out", "x", "--loss", "contrastive", "--method", "ism", "--ambiguity", "blur",
        "occlusion",
        "--loss-parameters", "negative_margin=0.7",
        "--image-size", "64", "--u-hidden", "8", "--no-freeze-bn", "--strict-data", "--gamma", "3", "--detach",
    )  # fmt: skip
    assert config == from_dict({
        "data": "glyphs", "out": "x", "loss": "contrastive", "method": "ism", "ambiguity": ("blur", "occlusion"),
        "image_size": 64, "loss_parameters": ("negative_margin=0.7",), "u_hidden": 8, "freeze_bn": False,
        "strict_data": True, "gamma": 3.0, "detach": True,
    })  # fmt: skip
    assert (config.method_options.metric.gamma, config.method_options.teaching.hidden) == (3.0, 8)


def test_every_flag_says_what_it_is_for():
    for action in training_parser()._actions:
        assert action.help, action.dest


def test_every_common_option_is_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted([*(option.name for option in common_options()), "freeze_trunk", "preset"])


def test_help_has_a_line_for_each_loss_method_and_trunk(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name in (*LOSSES, *METHODS, *TRUNKS, *SPECS, *PRESETS):
        (line,) = [line for line in lines if re.match(rf"{re.escape(name)}  +\w", line)]
        assert len(line) > len(name) + 8, line


def test_help_lists_the_options_of_each_method_under_it(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for group, flag in (
        ("options of method ism, idml, nir, diml, drml, dac, mic, diva, dcml, pads, abe, ranked-lmh:", "--tau X"),
        ("options of method dac:", "--groups N"),
        ("options of method mixup, idml, pel-mixup:", "--labels {sets,weighted}"),
        ("options of method pel, pel-mixup:", "--samples N"),
        ("options of method plain, mixup, ism, idml:", "--teach-u {none,ranking}"),
    ):
        assert flag in text.partition(group)[2]
        assert flag not in text.partition(group)[0].partition("options:")[2] or "--tau" not in flag
    assert "(default ranking with plain, mixup; none with ism, idml)" in text


def test_freeze_trunk_is_train_heads(tmp_path):
    assert parse("--data", "glyphs", "--out", "x", "--freeze-trunk").train == "heads"
    assert parse("--data", "glyphs", "--out", "x", "--no-freeze-trunk").train == "all"
    file = tmp_path / "run.yaml"
    file.write_text("freeze_trunk: true\n")
    assert parse("--data", "glyphs", "--out", "x", "--config", str(file)).train == "heads"


def test_a_file_gives_options_and_flags_override_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("data: glyphs\nout: x\nepochs: 7\nambiguity: [blur]\nlr: 0.002\n")
    config = parse("--config", str(file), "--epochs", "9")
    assert (config.data, config.epochs, config.lr, config.ambiguity) == ("glyphs", 9, 0.002, ("blur",))


@pytest.mark.parametrize(
    ("method", "ambiguity", "added"),
    [
        ("idml", (), 120),
        ("ism", (), 0),
        ("mixup", (), 120),
        ("plain", ("blur",), 0),
        ("mixup", ("cutmix",), 120),
        ("pel-mixup", ("occlusion",), 120),
    ],
)
def test_images_that_a_method_adds_to_a_batch(method, ambiguity, added):
    assert from_dict({"data": "glyphs", "out": "x", "method": method, "ambiguity": ambiguity}).added_images == added


@pytest.mark.parametrize(
    ("options", "teach_u", "hidden"),
    [
        ({}, "ranking", 64),
        ({"method": "mixup"}, "ranking", 64),
        ({"method": "plain", "u_hidden": 0}, "ranking", 0),
        ({"teach_u": "none"}, "none", 0),
        ({"method": "idml"}, "none", 0),
        ({"method": "idml", "teach_u": "ranking", "detach": True}, "ranking", 64),
        ({"preset": "paper"}, "none", 0),
        ({"preset": "paper", "method": "plain"}, "none", 0),
    ],
)
def test_what_teaches_u_by_default(options, teach_u, hidden):
    config = from_dict({"data": "glyphs", "out": "x", **options})
    assert (config.method_options.teaching.teach_u, config.method_options.teaching.hidden) == (teach_u, hidden)
    assert config.method == options.get("method", "idml" if "preset" in options else "plain")
    assert from_dict(to_dict(config)) == config


def test_differences_name_what_changed():
    old = from_dict({"data": "glyphs", "out": "x"})
    new = from_dict({"data": "glyphs", "out": "elsewhere", "lr": 0.5, "workers": 2})
    assert list_differences(old, new) == ["lr: 0.0001 → 0.5"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epoch": 3}, "unknown option 'epoch'; did you mean 'epochs'"),
        ({"loss": "triplet"}, "unknown loss 'triplet'; did you mean 'triplet_semihard'"),
        ({"method": "IDML"}, "unknown method 'IDML'; did you mean 'idml'"),
        ({"method": "idm"}, "unknown method 'idm'; did you mean 'idml'"),
        ({"ambiguity": ["mixupp"]}, "unknown ambiguity 'mixupp'; did you mean 'mixup'"),
        ({"schedule": "cos"}, "did you mean 'cosine'"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"epochs": 2.5}, "epochs must be a whole number"),
        ({"lr": 0}, "lr must be a number above 0"),
        ({"lr": float("nan")}, "lr must be a number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"holdout": 1.0}, "holdout must be below 1"),
        ({"batch_size": 10, "per_class": 4}, "batch_size 10 is not a multiple of per_class 4"),
        ({"tau": 3.0}, "method plain has no option 'tau': it belongs to ism, idml, nir"),
        (
            {"method": "pel", "labels": "sets"},
            "method pel has no option 'labels': it belongs to mixup, idml and pel-mixup",
        ),
        ({"method": "idml", "taus": 3.0}, "unknown option 'taus'; did you mean 'tau'"),
        ({"method_options": None}, "unknown option 'method_options'"),
        ({"freeze_trunk": True, "train": "last"}, "freeze_trunk trains the heads alone"),
        ({"freeze_trunk": "no"}, "freeze_trunk must be true or false, got 'no'"),
        (
            {"method": "mic", "loss": "margin_dw", "freeze_trunk": True, "ambiguity": ["mixup"]},
            "method mic chooses its batches as it learns, so mixtures cannot be computed before",
        ),
        ({"method": ["idml"]}, "unknown method"),
        ({"bound": None}, "the option 'bound' was removed"),
        ({"introspection": "ranking"}, "the option 'introspection' was removed"),
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
    def chosen(*flags):
        return to_dict(parse("--out", "x", *flags))

    def values(config, *names):
        return tuple(config[name] for name in names)

    paper = chosen("--data", "cub:x", "--preset", "paper")
    assert values(paper, "trunk", "image_size", "batch_size", "epochs") == ("resnet50", 224, 120, 60)
    assert values(paper, "lr", "step_epochs", "step_factor", "warmup_epochs") == (6e-4, 5, 0.5, 5)
    assert values(paper, "tau", "gamma", "rule", "labels") == (5.0, 0.0, "similar", "sets")
    mixup = chosen("--data", "cub:x", "--preset", "paper", "--method", "mixup")
    assert values(mixup, "trunk", "mixing", "labels") == ("resnet50", "separate", "weighted")
    cars = chosen("--data", "cars:x", "--preset", "paper")
    assert values(cars, "lr", "step_epochs", "gamma") == (2.5e-4, 10, 3.0)
    sop = chosen("--data", "sop:x", "--preset", "paper")
    assert values(sop, "lr", "step_epochs", "step_factor", "gamma") == (6e-4, 10, 0.25, 0.0)
    assert chosen("--data", "cub:x", "--preset", "paper", "--lr", "1e-5")["lr"] == 1e-5
    release = chosen("--data", "cub:x", "--preset", "release")
    assert values(release, "rule", "gamma", "labels", "loss") == ("release", 4.0, "weighted", "proxy_anchor")
    assert values(paper, "mixing", "crop", "warmup_u") == ("separate", "window", True)
    file = tmp_path / "mine.yaml"
    file.write_text("preset: paper\nepochs: 3\n")
    assert values(chosen("--data", "cub:x", "--config", str(file)), "epochs", "trunk") == (3, "resnet50")
    file.write_text("preset: papre\n")
    with pytest.raises(ValueError, match="unknown preset 'papre'; did you mean 'paper'"):
        chosen("--data", "cub:x", "--config", str(file))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", ["plain", "pel-mixup"])
def test_a_preset_with_another_method_gives_what_that_method_has(name, method):
    config = to_dict(from_dict({"data": "cars:x", "out": "x", "preset": name, "method": method}))
    given = preset(name, "cars:x")
    assert config["method"] == method
    assert "tau" not in config
    assert all(config[key] == given[key] for key in given if key in config and key != "method")
    with pytest.raises(ValueError, match="has no option 'tau'"):
        from_dict({"data": "cars:x", "out": "x", "preset": name, "method": method, "tau": 5.0})


def test_there_are_about_thirty_common_options():
    assert len(to_dict(TrainConfig("glyphs", "x", method="pel"))) - 2 < 38
