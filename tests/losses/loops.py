"""Every pair value and every loss written from its definition, one pair at a time: the slow reference of the tests.

Vectors are 1-D tensors, pair values 0-D tensors in lists of lists, so that gradients flow; labels are Python sets.
"""

import math

import torch

# --- the value of one pair, from normalised semantic vectors s, t and raw uncertainty vectors u, v ---


def unit(x):
    length = x.norm()
    return x / length if length > 0 else x


def euclidean(s, t):
    return (s - t).norm()


def cosine(s, t):
    return s.dot(t)


def softening(alpha, u, v, tau, gamma):
    beta = (u + v).norm()
    return torch.exp(-(beta + gamma) / (tau * alpha))


def distance_off(s, u, t, v, tau, gamma):
    return euclidean(s, t)


def cosine_off(s, u, t, v, tau, gamma):
    return cosine(s, t)


def distance_similar(s, u, t, v, tau, gamma):
    alpha = euclidean(s, t)
    return alpha * softening(alpha, u, v, tau, gamma)


def cosine_similar(s, u, t, v, tau, gamma):
    return 1 - (1 - cosine(s, t)) * softening(euclidean(s, t), u, v, tau, gamma)


def cosine_dissimilar(s, u, t, v, tau, gamma):
    return cosine(s, t) * softening(euclidean(s, t), u, v, tau, gamma)


def distance_strict(s, u, t, v, tau, gamma):
    alpha = euclidean(s, t)
    return alpha if alpha > (u + v).norm() + gamma else 0 * alpha


def cosine_release(s, u, t, v, tau, gamma):
    """A proxy ``t`` comes as it is, not normalised; τ and γ are fixed."""
    beta_squared = (unit(u) + unit(v)).norm() ** 2
    gap = (s - t).norm() ** 2
    return 1 - (1 - cosine(s, unit(t))) * torch.exp(-(beta_squared + 4) / (5 * gap))


def table(value, tau, gamma, images, others=None):
    """``value`` of every pair; None for an image and itself, so that no loss can read it."""
    images = [(unit(s), u) for s, u in images]
    columns = images if others is None else others
    if others is not None and value is not cosine_release:
        columns = [(unit(t), v) for t, v in others]
    rows = []
    for i, (s, u) in enumerate(images):
        row = []
        for j, (t, v) in enumerate(columns):
            row.append(None if others is None and i == j else value(s, u, t, v, tau, gamma))
        rows.append(row)
    return rows


# --- sums ---


def mean(terms):
    return sum(terms) / len(terms)


def mean_of_positive(terms):
    return mean([t for t in terms if t > 0])


def log_one_plus(terms):
    return torch.log(1 + sum(terms)) if terms else 0.0


def partners(i, sets, columns=None):
    """The places of the images that image i is compared with: all others of its batch, or all ``columns``."""
    return [j for j in range(len(sets)) if j != i] if columns is None else list(range(len(columns)))


def positives(i, sets, columns=None):
    others = sets if columns is None else columns
    return [j for j in partners(i, sets, columns) if sets[i] & others[j]]


def negatives(i, sets, columns=None):
    others = sets if columns is None else columns
    return [j for j in partners(i, sets, columns) if not sets[i] & others[j]]


# --- losses over pairs: values[i][j], sets[i]; columns[j] are the sets of other images, if j are other images ---


def triplet_semihard(d, sets, margin=0.1, columns=None):
    terms = []
    for a in range(len(sets)):
        for p in positives(a, sets, columns):
            for n in negatives(a, sets, columns):
                if d[a][p] < d[a][n] < d[a][p] + margin:
                    terms.append(d[a][p] - d[a][n] + margin)
    return mean(terms)


def contrastive(d, sets, positive_margin=0.0, negative_margin=0.5, power=1, columns=None):
    pulls, pushes = [], []
    for i in range(len(sets)):
        pulls += [d[i][j] ** power - positive_margin for j in positives(i, sets, columns)]
        pushes += [negative_margin - d[i][j] ** power for j in negatives(i, sets, columns)]
    return mean_of_positive(pulls) + mean_of_positive(pushes)


def margin_dw(d, sets, sampled, beta=1.2, margin=0.2, columns=None):
    """``sampled`` lists the (anchor, negative) pairs; a pair drawn twice counts twice."""
    terms = []
    for i in range(len(sets)):
        for j in positives(i, sets, columns):
            terms.append(d[i][j] - (beta - margin))
    for i, j in sampled:
        terms.append((beta + margin) - d[i][j])
    return mean_of_positive(terms)


def fast_ap(d, sets, bins=10, columns=None):
    width = 4 / bins
    precisions = []
    for i in range(len(sets)):
        mine = positives(i, sets, columns)
        if not mine:
            continue
        squares = {j: d[i][j] ** 2 for j in partners(i, sets, columns)}
        hits, all_seen = [], []
        for b in range(bins + 1):
            shares = {}
            for j, square in squares.items():
                if abs(square.item() - b * width) < width:
                    shares[j] = 1 - abs(square - b * width) / width
            hits.append(sum(share for j, share in shares.items() if j in mine))
            all_seen.append(sum(shares.values()))
        total = 0
        for b in range(bins + 1):
            if sum(all_seen[: b + 1]) > 0:
                total = total + hits[b] * sum(hits[: b + 1]) / sum(all_seen[: b + 1])
        precisions.append(total / len(mine))
    return 1 - mean(precisions)


def multi_similarity(c, sets, alpha=2.0, beta=50.0, base=0.5, epsilon=0.1, columns=None):
    terms = []
    for i in range(len(sets)):
        same, other = positives(i, sets, columns), negatives(i, sets, columns)
        kept_same = [j for j in same if any(c[i][j] - epsilon < c[i][k] for k in other)]
        kept_other = [j for j in other if any(c[i][j] + epsilon > c[i][k] for k in same)]
        pull = log_one_plus([torch.exp(-alpha * (c[i][j] - base)) for j in kept_same]) / alpha
        push = log_one_plus([torch.exp(beta * (c[i][j] - base)) for j in kept_other]) / beta
        terms.append(pull + push)
    return mean(terms)


def circle(c, sets, relaxation=0.4, scale=80.0, columns=None):
    m = relaxation
    terms = []
    for i in range(len(sets)):
        near, far = [], []
        for j in positives(i, sets, columns):
            pace = max(0.0, 1 + m - c[i][j].item())
            near.append(torch.exp(-scale * pace * (c[i][j] - (1 - m))))
        for j in negatives(i, sets, columns):
            pace = max(0.0, c[i][j].item() + m)
            far.append(torch.exp(scale * pace * (c[i][j] - m)))
        if near and far:
            terms.append(torch.log1p(sum(near) * sum(far)))
    return mean_of_positive(terms)


def ranked_list(
    d,
    sets,
    alpha=1.2,
    margin=0.4,
    temperature=10.0,
    positive_temperature=0.0,
    positive_weight=1.0,
    negative_weight=1.0,
    columns=None,
):
    total = 0.0
    for i in range(len(sets)):
        far = [d[i][j] for j in positives(i, sets, columns) if d[i][j] > alpha - margin]
        near = [d[i][j] for j in negatives(i, sets, columns) if d[i][j] < alpha]
        for values, sign, threshold, heat, share in (
            (far, 1, alpha - margin, positive_temperature, positive_weight),
            (near, -1, alpha, temperature, negative_weight),
        ):
            weights = [math.exp(heat * sign * (x.item() - threshold)) for x in values]  # constants to the gradient
            if values:
                terms = [w * sign * (x - threshold) for w, x in zip(weights, values, strict=True)]
                total = total + share * sum(terms) / sum(weights)
    return total / len(sets)


def rankmi(d, sets, sampled, layers, slope=4.0, offset=1.2, columns=None):
    """``layers`` are the critic's weights and biases; ``sampled`` lists the (anchor, negative) pairs."""

    def value(x, parameters):
        (a, b), (c, e), (f, g) = parameters
        hidden = torch.relu(c @ torch.relu(a[:, 0] * x + b) + e)
        return f[0] @ hidden + g[0] + slope * (offset - x)

    def cost(pulled, pushed, parameters):
        one = torch.ones((), dtype=torch.float64)
        cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
        pulls = [cross_entropy(value(x, parameters), one) for x in pulled]
        pushes = [cross_entropy(value(x, parameters), 0 * one) for x in pushed]
        return mean(pulls) + mean(pushes)

    near = [d[i][j] for i in range(len(sets)) for j in positives(i, sets, columns)]
    far = [d[i][j] for i in range(len(sets)) for j in negatives(i, sets, columns)]
    fixed = [(weight.detach(), bias.detach()) for weight, bias in layers]
    critic = cost([x.detach() for x in near], [x.detach() for x in far], layers)
    return critic + cost(near, [d[i][j] for i, j in sampled], fixed)


# --- losses over proxies: values[i][class], the classes of image i are sets[i] ---


def proxy_nca(d, sets, scale=32.0):
    terms = []
    for row, classes in zip(d, sets, strict=True):
        nearness = [torch.exp(-scale * value**2) for value in row]
        terms.append(-torch.log(sum(nearness[k] for k in classes) / sum(nearness)))
    return mean(terms)


def proxy_nca_pp(d, sets, temperature=1 / 9):
    terms = []
    for row, classes in zip(d, sets, strict=True):
        chosen = sum(torch.exp(-row[k] * row[k] / temperature) for k in classes)
        rest = sum(torch.exp(-row[k] * row[k] / temperature) for k in range(len(row)) if k not in classes)
        terms.append(torch.log(chosen + rest) - torch.log(chosen))
    return mean(terms)


def softmax(c, sets, scale=20.0):
    terms = []
    for row, classes in zip(c, sets, strict=True):
        nearness = [torch.exp(scale * value) for value in row]
        terms.append(-torch.log(sum(nearness[k] for k in classes) / sum(nearness)))
    return mean(terms)


def proxy_anchor(c, sets, alpha=32.0, margin=0.1):
    pulls, pushes = [], []
    for k in range(len(c[0])):
        near = [torch.exp(-alpha * (c[i][k] - margin)) for i in range(len(sets)) if k in sets[i]]
        far = [torch.exp(alpha * (c[i][k] + margin)) for i in range(len(sets)) if k not in sets[i]]
        if near:
            pulls.append(log_one_plus(near))
        pushes.append(log_one_plus(far))
    return mean(pulls) + mean(pushes)


def soft_triple(c, sets, centers_per_class=10, scale=20.0, entropy=0.1, margin=0.01):
    terms = []
    for row, classes in zip(c, sets, strict=True):
        inside, outside = [], []
        for k in range(len(row) // centers_per_class):
            centers = row[k * centers_per_class : (k + 1) * centers_per_class]
            weights = [torch.exp(value / entropy) for value in centers]
            similarity = sum(w * value for w, value in zip(weights, centers, strict=True)) / sum(weights)
            if k in classes:
                inside.append(torch.exp(scale * (similarity - margin)))
            else:
                outside.append(torch.exp(scale * similarity))
        terms.append(-torch.log(sum(inside) / (sum(inside) + sum(outside))))
    return mean(terms)
