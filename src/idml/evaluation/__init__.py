"""How good a model is: exact neighbours, retrieval and clustering figures, the worth of an uncertainty score."""

from idml.evaluation.knn import Neighbours, nearest
from idml.evaluation.retrieval import evaluate_retrieval
from idml.evaluation.scores import GALLERY_AWARE, QUERY_ONLY, ErrorPredictor, NeighbourScores, neighbour_scores
from idml.evaluation.uncertainty import (
    auroc,
    bootstrap_interval,
    evaluate_uncertainty,
    paired_rise,
    risk_coverage,
)

__all__ = [
    "GALLERY_AWARE",
    "QUERY_ONLY",
    "ErrorPredictor",
    "NeighbourScores",
    "Neighbours",
    "auroc",
    "bootstrap_interval",
    "evaluate_retrieval",
    "evaluate_uncertainty",
    "nearest",
    "neighbour_scores",
    "paired_rise",
    "risk_coverage",
]
