"""How much an uncertainty score is worth."""

import torch
from torch import Tensor


def auroc(scores: Tensor, positive: Tensor) -> float:
    """P(score of a positive > score of a negative), ties counted half: the area under the ROC curve.

    >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    0.75
    """
    if scores.ndim != 1 or positive.dtype != torch.bool or positive.shape != scores.shape:
        raise ValueError(f"need scores [n] and a bool mask [n], got {list(scores.shape)} and {list(positive.shape)}")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError(f"{int((~torch.isfinite(scores)).sum())} of {len(scores)} scores are NaN or infinite")
    above, below = scores[positive].double(), scores[~positive].double().sort().values
    if len(above) == 0 or len(below) == 0:
        raise ValueError("AUROC needs both positives and negatives")
    less = torch.searchsorted(below, above)
    at_most = torch.searchsorted(below, above, right=True)
    return float((less + at_most).double().mean() / (2 * len(below)))
