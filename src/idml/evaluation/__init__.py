"""Evaluation of a model: exact neighbours, retrieval and clustering figures, quality of uncertainty scores."""

from idml.evaluation.knn import Neighbours, nearest
from idml.evaluation.retrieval import evaluate_retrieval
from idml.evaluation.scores import GALLERY_AWARE, QUERY_ONLY, ErrorPredictor, NeighbourScores, neighbour_scores
from idml.evaluation.uncertainty import (
    auroc,
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
    "evaluate_retrieval",
    "evaluate_uncertainty",
    "nearest",
    "neighbour_scores",
    "paired_rise",
    "risk_coverage",
]
