"""The networks that the lessons and the experiment train."""

import torch
from torch import nn


class SmallCNN(nn.Module):
    """The network of the controlled experiment, small enough for a CPU.

    Three 5x5 convolutions, each halved by 2x2 max pooling, then two linear layers. Takes images (N, 3, 32, 32), gives
    logits (N, num_classes). There is no activation between the layers, as in the experiment as published: max pooling
    is the only non-linearity. With 10 classes it has 145,578 parameters.
    """

    def __init__(self, num_classes: int = 10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=5, padding=2),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, kernel_size=5, padding=2),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=5, padding=2),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.Linear(64, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images))
