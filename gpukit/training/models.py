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


class FalseColourNet(nn.Module):
    """A small network from image to image: gives false-colour images their true colours back.

    Takes images (N, 3, H, W) on the scale 0..1 and gives as many of the same size and scale: three 3x3 convolutions,
    each normalised over the batch (Ioffe and Szegedy 2015) and rectified, then a fourth to three channels and a
    sigmoid. Each output pixel sees 9x9 input pixels. With batch normalisation, `train()` and `eval()` differ. At the
    width of 24 channels it has 11,811 parameters.
    """

    def __init__(self, width: int = 24):
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (3, width, width):
            # The normalisation that follows has an offset of its own.
            layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(width)]
            layers += [nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 3, kernel_size=3, padding=1), nn.Sigmoid())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)
