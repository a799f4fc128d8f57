"""PADS: policy-adapted sampling of negatives (Roth, Milbich, Ommer, CVPR 2020).

Negatives are drawn by a histogram h over their distance to the anchor (`idml.mining.histogram_negatives`). Every M
steps a policy sees how well validation images retrieve, and scales each of the 29 bins by 0.8, 1 or 1.25:

    r = sign(m_t − m_{t−1})                          reward; m is R@1, or the mean of R@1 and NMI
    A = r + 0.99·v(s_t) − v(s_{t−1})                 advantage of the last action, a constant to the gradient
    L_policy = −mean_b min(ρ_b·A, clip(ρ_b, 1 ± 0.2)·A) + ½(v(s_{t−1}) − m_t)²        ρ_b = π/π_old of bin b's action

The state s holds the last 20 validation figures, their means over 2, 8, 16, 32, h, and the share of the epochs done.
π_old is renewed every 5 decisions. The loss is the margin loss with a learned β for each class. Validation images are a
share of each training class; they are left out of training.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.labels import pair_masks
from idml.losses.margin_dw import MarginDW, margin_of_anchors
from idml.methods.base import Task
from idml.methods.clusters import cluster_images
from idml.methods.metric_choice import MetricChoice, MetricMethod
from idml.methods.options import check_number, check_types
from idml.mining import histogram_negatives

BINS, LOW, HIGH = 29, 0.1, 1.4
FACTORS = (0.8, 1.0, 1.25)
FIGURES = 7  # R@1, R@2, R@4, R@8, NMI, mean cosine distance within and between classes
MEMORY, WINDOWS, SHOWN = 32, (2, 8, 16, 32), 20
STATE = (SHOWN + len(WINDOWS)) * FIGURES + BINS + 1
RENEWAL, DISCOUNT, CLIP = 5, 0.99, 0.2
_LEAST = 1e-15


class SamplingPolicy(nn.Module):
    """An MLP from the state to logits of the three actions of each bin [29, 3], and to a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.actions, self.value = nn.Linear(128, BINS * len(FACTORS)), nn.Linear(128, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return log π of each action [29, 3] and the value."""
        hidden = self.body(state)
        return self.actions(hidden).view(BINS, len(FACTORS)).log_softmax(dim=1), self.value(hidden).squeeze(-1)


def policy_loss(log_new: Tensor, log_old: Tensor, advantage: Tensor) -> Tensor:
    """−mean_b min(ρ_b·A, clip(ρ_b, 1 ± 0.2)·A), the clipped objective of PPO; log-probabilities [29] of the actions."""
    ratio = (log_new - log_old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


@torch.no_grad()
def validation_figures(unit: Tensor, labels: Tensor, seed: int) -> Tensor:
    """R@1, 2, 4, 8, NMI of k-means, and the mean cosine distance within and between classes [7]."""
    cosines = unit @ unit.T
    same, other = pair_masks(labels[:, None] == labels)
    order = cosines.clone().fill_diagonal_(-torch.inf).topk(min(8, len(unit) - 1), dim=1).indices
    right = labels[order] == labels[:, None]
    queries = same.any(dim=1)
    recalls = [float(right[queries, :k].any(dim=1).double().mean()) for k in (1, 2, 4, 8)]
    found = cluster_images(unit, len(labels.unique()), seed)
    nmi = import_module("sklearn.metrics").normalized_mutual_info_score(labels.cpu().numpy(), found.numpy())
    within, between = (float((1 - cosines)[mask].mean()) if bool(mask.any()) else 0.0 for mask in (same, other))
    return torch.tensor([*recalls, float(nmi), within, between])


@dataclass(frozen=True)
class PadsOptions:
    """Options of PADS."""

    policy_steps: int = 30
    """Steps between two decisions of the policy; 0: the histogram stays as it is."""
    policy_lr: float = 100.0
    """Learning rate of the policy, in units of lr."""
    policy_reward: Literal["recall", "both"] = "recall"
    """What is rewarded: a rise of R@1 (CUB), or of the mean of R@1 and NMI."""
    validation: float = 0.15
    """Share of each training class that the policy is rewarded by, at least two images of it."""
    whole_batch: bool = True
    """Whether a positive can be drawn as a negative, as the authors do."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        check_types(self)
        check_number("policy_steps", self.policy_steps, at_least=0, whole=True)
        check_number("policy_lr", self.policy_lr, above=0)
        check_number("validation", self.validation, at_least=0)
        if self.validation >= 1:
            raise ValueError(f"validation must be below 1, got {self.validation}")
        if self.policy_steps and not self.validation:
            raise ValueError("the policy is rewarded by validation images: validation 0 needs policy_steps 0")


class Pads(MetricMethod):
    """The margin loss with negatives from a histogram that a policy adapts."""

    Options = PadsOptions
    options: PadsOptions
    plans_batches = True
    validation: Tensor
    histogram: Tensor
    steps: Tensor
    decisions: Tensor
    share_done: Tensor
    history: Tensor
    state: Tensor
    action: Tensor

    def __init__(self, options: PadsOptions, task: Task) -> None:
        super().__init__(options, task)
        start = float(task.loss_parameters.get("beta", 0.6))
        loss = options.choice.build_loss(task, learned_beta=True, beta=start)
        assert isinstance(loss, MarginDW)
        self.metric_loss = loss
        self.policy = SamplingPolicy()
        self.old_policy = copy.deepcopy(self.policy).requires_grad_(False)
        centres = LOW + (torch.arange(BINS) + 0.5) * (HIGH - LOW) / BINS
        histogram = torch.where((centres >= 0.3) & (centres <= 0.7), 1.0, _LEAST)
        self.register_buffer("histogram", histogram / histogram.sum())
        self.register_buffer("validation", self._choose_validation())
        for name in ("steps", "decisions"):
            self.register_buffer(name, torch.tensor(0))
        self.register_buffer("share_done", torch.tensor(0.0))
        self.register_buffer("history", torch.zeros(MEMORY, FIGURES))
        self.register_buffer("state", torch.zeros(STATE))
        self.register_buffer("action", torch.zeros(BINS, dtype=torch.long))

    @classmethod
    def check_options(cls, options: PadsOptions, *, train: str, loss: str) -> None:
        """The histogram chooses the negatives of the margin loss."""
        super().check_options(options, train=train, loss=loss)
        if loss != "margin_dw":
            raise ValueError(f"method pads draws the negatives of the margin loss, not of {loss}: say --loss margin_dw")

    def learning_rate_factors(self) -> dict[str, float]:
        """The policy has a rate of its own."""
        rates = super().learning_rate_factors()
        return {name: self.options.policy_lr if "policy." in name else rate for name, rate in rates.items()}

    def _choose_validation(self) -> Tensor:
        """Which training images are for validation: a share of each class, at least 2, if 2 others are left."""
        labels, chosen = self.task.labels, torch.zeros(len(self.task.labels), dtype=torch.bool)
        if not self.options.policy_steps or not len(labels):
            return chosen
        order = torch.randperm(len(labels), generator=random_stream("validation of the policy", self.task.seed))
        for label in labels.unique().tolist():
            members = order[labels[order] == label]
            count = max(2, round(self.options.validation * len(members)))
            if len(members) - count >= 2:
                chosen[members[:count]] = True
        return chosen

    # ---- batches ----

    def start_epoch(self, epoch: int, embed: Callable[[], tuple[Tensor, Embeddings]]) -> None:
        """Note how much of the training is done."""
        self.share_done.fill_(epoch / self.task.epochs)

    def plan(self, usable: Tensor, *, batch_size: int, per_class: int, epoch: int) -> list[Tensor]:
        """Batches without the validation images."""
        trained = usable[~self.validation.cpu()[usable]]
        return super().plan(trained, batch_size=batch_size, per_class=per_class, epoch=epoch)

    # ---- the loss and the policy ----

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The margin loss of sampled negatives, the loss of the policy when it decides, and the ranking of ‖u‖."""
        distances, matches = self.metric_loss.pairs(embeddings), batch.labels.matches()
        drawn = histogram_negatives(
            distances, matches, self.histogram, low=LOW, high=HIGH, whole_batch=self.options.whole_batch, seed=seed
        )
        positives = pair_masks(matches)[0].nonzero(as_tuple=True)
        beta, margin = self.metric_loss.anchor_betas(batch.labels), self.metric_loss.parameters_of_loss["margin"]
        terms = {"pairs": margin_of_anchors(distances, (positives[0], positives[1]), drawn, beta, margin)}
        terms |= self.teach(embeddings, batch, len(numbers))
        self.steps += 1
        every = self.options.policy_steps
        if every and self.embed is not None and int(self.steps) % every == 0:
            terms["policy"] = self.decide(self._validate(), seed)
        return terms

    def _validate(self) -> Tensor:
        assert self.embed is not None
        numbers, embeddings = self.embed()
        chosen = self.validation.cpu()[numbers].nonzero().squeeze(1)
        if len(chosen) < 2:
            raise ValueError("method pads needs classes of at least 4 images to validate its policy")
        return validation_figures(embeddings[chosen].unit, self.task.labels[numbers[chosen]], self.task.seed)

    def decide(self, figures: Tensor, seed: int) -> Tensor:
        """Scale the bins by the policy's next action; return the policy's loss for the last one."""
        figures = figures.to(self.history)
        before, made = self.history[-1].clone(), int(self.decisions)
        self.history.copy_(torch.cat([self.history[1:], figures[None]]))
        state, last = self._describe(made + 1), self.state.clone()
        log_next, value_next = self.policy(state)
        loss: Tensor = log_next.sum() * 0.0
        if made:
            reached, reached_before = (self._score(x) for x in (figures, before))
            log_new, value = self.policy(last)
            with torch.no_grad():
                advantage = torch.sign(reached - reached_before) + DISCOUNT * value_next - value
                log_old = self.old_policy(last)[0]
            action = self.action.clone().unsqueeze(1)
            new, old = (x.gather(1, action).squeeze(1) for x in (log_new, log_old))
            loss = policy_loss(new, old, advantage) + 0.5 * (value - reached).square()
        if made % RENEWAL == 0:
            self.old_policy.load_state_dict(self.policy.state_dict())
        draws = torch.multinomial(log_next.detach().exp().cpu(), 1, generator=random_stream("policy", seed)).squeeze(1)
        self.action.copy_(draws)
        self.apply_action()
        self.state.copy_(state)
        self.decisions += 1
        return loss

    def apply_action(self) -> None:
        """Scale the bins by the chosen factors and normalise them."""
        factors = torch.tensor(FACTORS, device=self.histogram.device)[self.action]
        scaled = (self.histogram * factors).clamp_min(_LEAST)
        self.histogram.copy_(scaled / scaled.sum())

    def _score(self, figures: Tensor) -> Tensor:
        return figures[0] if self.options.policy_reward == "recall" else (figures[0] + figures[4]) / 2

    def _describe(self, known: int) -> Tensor:
        """The state after ``known`` validations."""
        means = [self.history[-min(window, known) :].mean(dim=0) for window in WINDOWS]
        parts: list[Any] = [self.history[-SHOWN:].flatten(), *means, self.histogram, self.share_done.view(1)]
        return torch.cat(parts)
