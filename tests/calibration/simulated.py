"""Simulated queries whose right answers are known, and the probability of a number of broken guarantees."""

import torch
from scipy.stats import binom

from idml.calibration.evidence import Evidence


def population(n, unknown, seed=0, classes=40):
    """Queries, a share of them unknown: evidence, correct, known, same_class [n, 10] and classes."""
    g = torch.Generator().manual_seed(seed)
    hard = torch.rand(n, generator=g)
    known = torch.rand(n, generator=g) >= unknown
    wrong = (torch.rand(n, generator=g) < hard**3) | ~known
    noise = lambda scale: scale * torch.randn(n, generator=g)  # noqa: E731
    near = (0.4 + 0.3 * hard + noise(0.08) + 0.25 * ~known).clamp_min(0)
    level, margin = hard + noise(0.3), -(1 - hard) * (0.5 + 0.5 * known) + noise(0.15)
    late = torch.randint(2, 13, (n,), generator=g)
    places = torch.where(wrong, torch.where(known & (late <= 10), late, 0), 1)  # of the first right result; 0: none
    same_class = torch.arange(1, 11) == places.unsqueeze(1)
    evidence = Evidence(
        level=level.abs(),
        nearest=near,
        kth=near + 0.2,
        spread=near / (near + 0.2),
        gap=margin / 3,
        pair=2 * level.abs(),
        margin=margin,
        ratio=near / (near - margin.clamp_max(0) + 0.1),
        entropy=(hard + noise(0.2)).clamp_min(0),
        disagreement=(hard + noise(0.2)).clamp(0, 0.9),
    )
    return evidence, ~wrong, known, same_class, torch.randint(classes, (n,), generator=g)


def excess(broken, rounds, rate):
    """P(so many or more broken guarantees) if each is broken with probability ``rate``."""
    return float(binom.sf(broken - 1, rounds, rate))
