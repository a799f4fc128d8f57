"""The keywords of `idml.train` with their types, for editors and type checkers.

They are the options of `TrainConfig` and of every method; a test compares them. `idml train --help` explains them.
"""

from collections.abc import Sequence
from typing import Literal, Required, TypedDict


class TrainOptions(TypedDict, total=False):
    """Options of a training run; those of a method may be given with that method alone."""

    # ---- of all methods ----

    data: Required[str]
    out: Required[str]
    loss: str
    loss_parameters: Sequence[str]
    method: str
    ambiguity: Sequence[str]
    trunk: str
    pretrained: bool
    weights: str | None
    train: Literal["all", "last", "heads"]
    crops: int
    embedding_dim: int
    pca: bool
    image_size: int | None
    crop: Literal["window", "resized"]
    epochs: int
    batch_size: int
    per_class: int
    micro_batch: int
    lr: float
    proxy_lr: float | None
    weight_decay: float
    schedule: Literal["constant", "step", "cosine"]
    step_epochs: int
    step_factor: float
    warmup_epochs: int
    warmup_u: bool
    freeze_bn: bool
    clip: float
    precision: Literal["float32", "bfloat16"]
    holdout: float
    split: str
    strict_data: bool
    checkpoint_every: int
    workers: int
    seed: int
    preset: Literal["paper", "release"]
    freeze_trunk: bool

    # ---- of some methods ----

    teach_u: Literal["none", "ranking"]
    u_hidden: int | None
    mixing: Literal["separate", "joint", "against-clean"]
    labels: Literal["sets", "weighted"]
    mixture_weight: float | None
    mixture_beta: float | None
    tau: float
    gamma: float
    rule: Literal["similar", "dissimilar", "release"]
    fit: bool
    proxy_uncertainty: bool
    detach: bool
    samples: int
    kl_weight: float
    nir_form: Literal["energy", "exponential"]
    nir_weight: float | None
    align_weight: float | None
    flow_lr: float
    introspective: bool
    members: int
    shared_trunk: bool
    nodes: int
    whole_weight: float
    reconstruction_weight: float
    groups: int
    regroup_epochs: int
    whole_epochs: float
    clusters: int
    per_cluster: int
    recluster_epochs: int
    cluster_weight: float
    cluster_noise: float
    adversary_weight: float
    task_weight: float
    diva_adversary: float
    temperature: float
    key_momentum: float
    queue: int
    composites: int
    reinforcement_weight: float
    policy_steps: int
    policy_lr: float
    policy_reward: Literal["recall", "both"]
    validation: float
    whole_batch: bool
    learners: int
    divergence_weight: float
    divergence_margin: float
    stage_heads: int
