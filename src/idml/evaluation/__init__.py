"""How good a model is: exact neighbours, retrieval and clustering figures."""

from idml.evaluation.neighbours import Neighbours, nearest
from idml.evaluation.retrieval import evaluate_retrieval

__all__ = ["Neighbours", "evaluate_retrieval", "nearest"]
