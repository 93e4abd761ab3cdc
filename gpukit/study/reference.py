"""The published table of the controlled experiment, as reference data: measured elsewhere, by others, not here.

Its four rows are the same program on four machines: a small network on CIFAR-10, each row the mean of epochs 3 to 10,
training pass and test pass together. With batches of 64 small images, what it compares is mostly how fast each
machine's CPU makes batches out of PIL images.
"""

from dataclasses import dataclass
from typing import Any

from gpukit.study.variables import Experiment


@dataclass(frozen=True)
class PublishedRow:
    """One row of the published table. It was measured elsewhere, by others."""

    hardware: str
    place: str
    seconds_per_epoch: float


PUBLISHED = (
    PublishedRow("Tesla T4", "Kaggle", 11.82),
    PublishedRow("RTX 3050", "a home PC", 12.50),
    PublishedRow("home CPU", "a home PC", 27.35),
    PublishedRow("cloud CPU", "Kaggle", 55.62),
)

# The work behind those four rows. The seed is not known.
PUBLISHED_WORK: dict[str, Any] = {
    "data": "cifar10",
    "train_images": 50_000,
    "valid_images": 10_000,
    "network": "SmallCNN",
    "batch_size": 64,
    "epochs": 10,
    "warmup_epochs": 2,
    "optimiser": "SGD",
    "learning_rate": 0.01,
    "loss": "cross-entropy",
    "shuffle": False,
    "normalize": False,
}


def differs_from_published(experiment: Experiment) -> tuple[str, ...]:
    """The variables in which `experiment` is other work than that of the published rows. Empty: the same work."""
    return tuple(name for name, value in PUBLISHED_WORK.items() if getattr(experiment, name) != value)
