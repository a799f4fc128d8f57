import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning import miners
from scipy import stats

from idml import IntrospectiveMetric, LabelSets
from idml.mining import distance_weighted, log_inverse_density, multi_similarity, semihard

OFF = IntrospectiveMetric(rule="off")


def batch(seed, n=40, d=6, classes=7):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    x = torch.randn(classes, d, generator=g)[labels] + torch.randn(n, d, generator=g)
    return x, LabelSets(labels)


@given(st.integers(0, 10_000), st.floats(0.01, 1.0))
def test_semihard_counts_what_a_triple_loop_counts(seed, margin):
    x, labels = batch(seed, n=14, classes=4)
    d, matches = OFF.distances(x), labels.matches()
    counts, number = semihard(d, matches, margin)
    expected, triplets = torch.zeros_like(d), 0
    for a in range(len(d)):
        for p in range(len(d)):
            for n in range(len(d)):
                if a != p and matches[a, p] and not matches[a, n] and d[a, p] < d[a, n] < d[a, p] + margin:
                    expected[a, p] += 1
                    expected[a, n] -= 1
                    triplets += 1
    assert torch.equal(counts, expected)
    assert int(number) == triplets


def test_semihard_with_equal_distances():
    """A negative as far as the positive is hard, one at exactly the margin is easy: neither is semi-hard."""
    d = torch.tensor([[0.0, 0.5, 0.5, 0.75, 0.625]]).expand(5, 5).contiguous()
    matches = torch.zeros(5, 5, dtype=torch.bool)
    matches[0, 1] = True
    counts, number = semihard(d, matches, 0.25)
    assert counts[0].tolist() == [0, 1, 0, 0, -1]
    assert int(number) == 1


@pytest.mark.parametrize("seed", range(6))
def test_multi_similarity_keeps_the_pairs_that_the_peer_keeps(seed):
    x, labels = batch(seed)
    positive, negative = multi_similarity(OFF.cosines(x), labels.matches(), 0.1)
    a1, p, a2, n = miners.MultiSimilarityMiner(epsilon=0.1)(x, labels.ids.squeeze(1))
    assert sorted(zip(*[i.tolist() for i in positive.nonzero(as_tuple=True)], strict=True)) == sorted(
        zip(a1.tolist(), p.tolist(), strict=True)
    )
    assert sorted(zip(*[i.tolist() for i in negative.nonzero(as_tuple=True)], strict=True)) == sorted(
        zip(a2.tolist(), n.tolist(), strict=True)
    )
    assert positive.any()
    assert negative.any()


@pytest.mark.parametrize("dim", [3, 16, 128, 512])
def test_density_is_the_papers_formula(dim):
    d = torch.linspace(0.5, 1.4, 50, dtype=torch.float64)
    expected = (2 - dim) * torch.log(d) + (3 - dim) / 2 * torch.log(1 - d**2 / 4)
    torch.testing.assert_close(log_inverse_density(d, dim), expected)


@pytest.mark.parametrize("dim", [4, 8])
def test_density_undoes_the_distances_of_random_points(dim):
    """Weighted by p(d), the distances between random points of the sphere become uniform."""
    g = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(2000, dim, generator=g, dtype=torch.float64))
    d = torch.pdist(x)
    d = d[(d > 0.6) & (d < 1.4)]
    weight = log_inverse_density(d, dim).exp()
    histogram = torch.histogram(d, 8, range=(0.6, 1.4), weight=weight).hist
    assert (histogram / histogram.mean() - 1).abs().max() < 0.05


@pytest.mark.parametrize("dim", [3, 24, 512])
def test_negatives_are_drawn_with_probability_p(dim):
    """χ² of 60,000 draws for one anchor against p(d), clamped below 0.5, nothing beyond 1.4."""
    distances = torch.tensor([0.1, 0.3, 0.6, 0.62, 0.9, 1.0, 1.2, 1.39, 1.45, 1.9], dtype=torch.float64)
    n, draws = len(distances), 60_000
    clamped = distances.clamp_min(0.5)
    p = torch.exp(log_inverse_density(clamped, dim) - log_inverse_density(clamped, dim)[:8].max()) * (distances <= 1.4)
    p = p / p.sum()
    # one anchor, `repeats` positives (hence as many draws), and the negatives above
    repeats = 400
    matrix = torch.full((1 + repeats + n, 1 + repeats + n), 0.2, dtype=torch.float64)
    matrix[0, 1 + repeats :] = distances
    matches = torch.zeros_like(matrix, dtype=torch.bool)
    matches[0, : 1 + repeats] = True
    drawn = torch.cat([distance_weighted(matrix, matches, dim, seed=s)[1] for s in range(draws // repeats)])
    counts = torch.bincount(drawn - 1 - repeats, minlength=n)
    assert counts.sum() == draws
    assert counts[8:].sum() == 0
    likely = p * draws >= 5
    assert counts[~likely].sum() <= 100 * (p[~likely] * draws).sum() + 5
    if likely.sum() > 1:
        observed, expected = counts[likely].double(), p[likely] * draws
        assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


def test_one_negative_for_each_positive_pair():
    x, labels = batch(0)
    d, matches = OFF.distances(x), labels.matches()
    anchors, negatives = distance_weighted(d, matches, 6, seed=3)
    assert not matches[anchors, negatives].any()
    assert (d[anchors, negatives] <= 1.4).all()
    reachable = ((d <= 1.4) & ~matches).any(dim=1)
    positives = matches.sum(dim=1) - 1
    assert torch.equal(torch.bincount(anchors, minlength=len(d)), positives * reachable)


def test_draws_follow_the_seed():
    x, labels = batch(1)
    d, matches = OFF.distances(x), labels.matches()
    first, again, other = (distance_weighted(d, matches, 6, seed=s)[1] for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(0)
    free = distance_weighted(d, matches, 6)[1]
    torch.manual_seed(0)
    assert torch.equal(free, distance_weighted(d, matches, 6)[1])


def test_nothing_in_reach_draws_nothing():
    d = torch.full((4, 4), 1.9)
    anchors, negatives = distance_weighted(d, LabelSets(torch.tensor([0, 0, 1, 1])).matches(), 8, seed=0)
    assert len(anchors) == len(negatives) == 0
