"""Clusters of the training images: k-means, and names of clusters that stay when images are clustered again."""

import warnings
from importlib import import_module

import torch
from torch import Tensor


def cluster_images(points: Tensor, count: int, seed: int) -> Tensor:
    """The cluster 0 … count − 1 of each row [n], by k-means; more clusters than rows are a ``ValueError``."""
    if count > len(points):
        raise ValueError(f"{count} clusters need at least {count} images, but there are {len(points)}")
    means = import_module("sklearn.cluster").KMeans(count, n_init=1, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that equal rows share a cluster
        found = means.fit_predict(points.detach().double().cpu().numpy())
    return torch.as_tensor(found, dtype=torch.long)


def match_clusters(old: Tensor, new: Tensor, count: int) -> Tensor:
    """The new clusters [n] under the names of the old ones, so that as few images as possible change.

    New cluster i gets the name of the old cluster j of the assignment with the smallest Σ|new_i Δ old_j| (the size of
    the symmetric difference).

    >>> match_clusters(torch.tensor([0, 0, 1, 2]), torch.tensor([2, 2, 0, 1]), 3)
    tensor([0, 0, 1, 2])
    """
    table = torch.zeros(count, count, dtype=torch.long)
    table.index_put_((new, old), torch.ones(len(new), dtype=torch.long), accumulate=True)
    costs = table.sum(dim=1, keepdim=True) + table.sum(dim=0) - 2 * table
    rows, columns = import_module("scipy.optimize").linear_sum_assignment(costs.numpy())
    names = torch.empty(count, dtype=torch.long)
    names[torch.as_tensor(rows)] = torch.as_tensor(columns, dtype=torch.long)
    return names[new]
