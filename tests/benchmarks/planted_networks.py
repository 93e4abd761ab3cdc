"""Small networks to plant faults in: between them they have what the usual architectures are made of."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpukit.training.models import SmallCNN

Network = Callable[[int], tuple[nn.Module, Any, Callable]]


class Block(nn.Module):
    """Two convolutions with batch norm beside a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(outside)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return self.act(self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))) + self.shortcut(x))


class Residual(nn.Module):
    """Images (N, 3, 16, 16) to logits (N, 5)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.pool(self.blocks(F.relu(self.bn(self.stem(x))))).flatten(1))


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)

    def split(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v)]

    def forward(self, x):
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
        return self.merge((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.widen, self.act, self.narrow = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.narrow(self.act(self.widen(self.norm2(x)))))


class Language(nn.Module):
    """Tokens (N, T) to logits (N, T, 23); input and output share their weight."""

    def __init__(self, vocabulary: int = 23, width: int = 16, length: int = 10):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList([Layer(width, 4), Layer(width, 4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def place(self, tokens):
        return torch.arange(tokens.shape[1], device=tokens.device)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places(self.place(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Cell(nn.Module):
    """An LSTM's cell."""

    def __init__(self, inside: int, width: int):
        super().__init__()
        self.from_input, self.from_state = nn.Linear(inside, 4 * width), nn.Linear(width, 4 * width)

    def gates(self, x, h):
        return (self.from_input(x) + self.from_state(h)).chunk(4, dim=-1)

    def forward(self, x, state):
        h, c = state
        i, f, g, o = self.gates(x, h)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Recurrent(nn.Module):
    """Sequences (N, T, 6) to {"value": (N, 1), "last": (N, 12)}, through a cell that is called T times."""

    def __init__(self):
        super().__init__()
        self.cell = Cell(6, 12)
        self.head = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 12)
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
        return {"value": self.head(h), "last": h}


class Colour(nn.Module):
    """Images (N, 3, 12, 12) to images, by way of half the size."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, 2, padding=1), nn.ReLU()
        )
        self.norm = nn.GroupNorm(3, 12)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.out = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x):
        wide = self.down[1](self.down[0](x))
        deep = self.up(self.norm(self.down[3](self.down[2](wide))))
        return self.out(torch.cat([wide, deep], dim=1)).sigmoid()


def stirred(model: nn.Module) -> nn.Module:
    """Norms and buffers as they are after some training, not the ones and zeros they start from."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
                module.weight.add_(0.2 * torch.randn_like(module.weight))
                module.bias.add_(0.2 * torch.randn_like(module.bias))
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.add_(0.3 * torch.randn_like(module.running_mean))
                module.running_var.mul_(1 + 0.5 * torch.rand_like(module.running_var))
    return model


def small_cnn(seed: int):
    torch.manual_seed(seed)
    return SmallCNN(), (torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))), F.cross_entropy


def residual(seed: int):
    torch.manual_seed(seed)
    return stirred(Residual()), (torch.randn(6, 3, 16, 16), torch.randint(0, 5, (6,))), F.cross_entropy


def evaluated(seed: int):
    model, batch, loss_fn = residual(seed)
    return model.eval(), batch, loss_fn


def language(seed: int):
    torch.manual_seed(seed)
    tokens = torch.randint(0, 23, (5, 11))
    return (
        stirred(Language()),
        (tokens[:, :-1], tokens[:, 1:]),
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
    )


def recurrent(seed: int):
    torch.manual_seed(seed)
    batch = (torch.randn(7, 6, 6), torch.randn(7, 1))
    return Recurrent(), batch, lambda o, t: F.mse_loss(o["value"], t) + 0.1 * o["last"].square().mean()


def colour(seed: int):
    torch.manual_seed(seed)
    return stirred(Colour()), (torch.rand(4, 3, 12, 12), torch.rand(4, 3, 12, 12)), F.mse_loss


NETWORKS: dict[str, Network] = {
    "SmallCNN": small_cnn,
    "Residual": residual,
    "Residual (evaluation)": evaluated,
    "Language": language,
    "Recurrent": recurrent,
    "Colour": colour,
}
