"""`idml gallery info`: what a gallery holds, which model embeds it, and where the model's weights come from."""

import dataclasses
from pathlib import Path
from typing import Any

from idml.calibration.risk_control import describe_outgrown
from idml.model.backbones import PACKAGED
from idml.model.model import FILE, PRETRAINED, read_config, resolve_model
from idml.model.weight_sources import find_source, read_source
from idml.search.engines import Engine
from idml.search.feedback import read_feedback
from idml.search.gallery import Location, is_milvus, read_calibration
from idml.search.gallery_folder import ImageRoots, find_model, run_folder

_UNKNOWN = "the model does not say where its weights come from"


def describe_gallery(location: Location, engine: Engine, run: Location | None = None) -> dict[str, Any]:
    """Describe a gallery without loading its model; ``run`` is the run of a Milvus gallery."""
    labels = [item.label for item in engine.items()]
    known = {label for label in labels if label is not None}
    labelled = sum(label is not None for label in labels)
    calibration, reason, void = None, "", ""
    try:
        calibration = read_calibration(location, engine)
    except ValueError as error:
        reason = str(error)
    if calibration is not None and calibration.labelled != (labelled == len(labels)):
        reason = f"calibrated when its images had {'' if calibration.labelled else 'no '}labels"
        calibration = None
    elif calibration is not None and calibration.profile is not None:
        void = describe_outgrown(calibration.profile.size, len(labels))
    return {
        "gallery": str(location),
        "items": len(labels),
        "labelled": labelled,
        "classes": len(known),
        "dimensions": engine.properties.dimensions,
        "uncertainty": engine.properties.uncertainty,
        "model": _describe_model(location, engine, run),
        "folders": {} if is_milvus(location) else ImageRoots(Path(location)).read(),
        "calibrated": calibration is not None,
        "calibration": reason or ("" if calibration is None else calibration.queries),
        "void": void,
        "unknown_share": None if calibration is None else calibration.unknown,
        "feedback": len(read_feedback(location, engine.properties)),
    }


def describe_words(info: dict[str, Any]) -> list[str]:
    """The same in lines for people."""
    model, labelled = info["model"], f"{info['labelled']:,} with a label, {info['classes']:,} classes"
    lines = [f"{info['gallery']}: {info['items']:,} images, {labelled}"]
    size = f"{info['dimensions']} dimensions" + ("" if info["uncertainty"] else ", no u")
    lines.append(f"model {model['fingerprint']}: {model['words']} ({size})")
    lines.append(f"source of the weights: {model['source'] or _UNKNOWN}")
    lines.append(f"licence of the weights: {model['license'] or 'unknown'}")
    if model["sha256"]:
        lines.append(f"SHA-256 of the file of weights: {model['sha256']}")
    lines += [f"folder {name}: {path}" for name, path in info["folders"].items()]
    if info["calibrated"]:
        share = f"up to {info['unknown_share']:.0%} unknown queries"
        lines.append(f"calibrated for {share}, on {info['calibration']}")
        if info["void"]:
            lines.append(f"{info['void']}: nothing is promised until you calibrate again (idml calibrate)")
    else:
        lines.append(f"not calibrated{': ' + info['calibration'] if info['calibration'] else ''} (see idml calibrate)")
    if info["feedback"]:
        lines.append(f"{info['feedback']:,} judgements of answers")
    return lines


def _describe_model(location: Location, engine: Engine, run: Location | None) -> dict[str, Any]:
    found: dict[str, Any] = {"fingerprint": engine.properties.model, "words": "not stored in Milvus (see --model)"}
    found |= {"trunk": None, "image_size": None, "source": None, "license": None, "sha256": None}
    if run is None and is_milvus(location):
        return found
    place = resolve_model(find_model(Path(location)) if run is None else run)
    if str(place) == PRETRAINED:
        source = find_source(PACKAGED, pretrained=True)
        return {**found, "words": "the pretrained trunk", **dataclasses.asdict(source)}
    folder = run_folder(place)
    config = read_config(folder / FILE if Path(place).is_dir() else Path(place))
    words = f"{config.network} at {config.image_size} pixels" + ("" if config.head != "none" else ", as it is")
    origin = read_source(folder)
    if origin is None and config.weights_file is not None:
        origin = find_source(config.trunk, pretrained=True, file=config.weights_file, sha256=config.weights_sha256)
    found |= {"words": words, "trunk": config.trunk, "image_size": config.image_size}
    return found if origin is None else {**found, **dataclasses.asdict(origin)}
