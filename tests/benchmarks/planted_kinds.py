"""Kinds of fault: each changes one place of a copy of a network, and says which module then computes another thing."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from planted_networks import Attention, Block, Cell
from torch import nn

Plant = Callable[[nn.Module, random.Random], str]


@dataclass(frozen=True)
class Kind:
    """`plant(copy, chance)` plants the fault in a place chosen by chance and returns the module's path."""

    name: str
    networks: tuple[str, ...]
    plant: Plant


KINDS: list[Kind] = []
IMAGES, NORMED = ("SmallCNN", "Residual", "Colour"), ("Residual",)


def kind(name: str, *networks: str):
    def add(plant: Plant) -> Plant:
        KINDS.append(Kind(name, networks, plant))
        return plant

    return add


def choose(model: nn.Module, chance: random.Random, kind: type | tuple, fits: Callable = lambda m: True):
    """(path, module): one of the model's modules of that kind."""
    return chance.choice([(name, m) for name, m in model.named_modules() if isinstance(m, kind) and fits(m)])


def override(module: nn.Module, **methods: Callable) -> None:
    """Give one module other methods; `old(self, ...)` calls of the class stay possible through its base."""
    module.__class__ = type(type(module).__name__, (type(module),), methods)


def changed(module: nn.Module, before: Callable | None = None, after: Callable | None = None) -> None:
    """Change what goes into a module's forward, or what comes out."""
    base = type(module).forward

    def forward(self, *args):
        out = base(self, *(before(*args) if before else args))
        return after(out) if after else out

    override(module, forward=forward)


def layer_kind(name: str, networks: tuple[str, ...], types: type | tuple, before=None, after=None, fits=lambda m: True):
    """A kind that changes a layer's input or output."""

    @kind(name, *networks)
    def plant(model, chance):
        path, module = choose(model, chance, types, fits)
        changed(module, before, after)
        return path


def conv_kind(name: str, networks: tuple[str, ...], compute: Callable, fits=lambda m: True):
    """A kind that computes a convolution otherwise."""

    @kind(name, *networks)
    def plant(model, chance):
        path, module = choose(model, chance, nn.Conv2d, fits)
        override(module, forward=compute)
        return path


def norm_kind(name: str, compute: Callable):
    """A kind that normalises over the batch otherwise."""

    @kind(name, *NORMED)
    def plant(model, chance):
        path, module = choose(model, chance, nn.BatchNorm2d)
        override(module, forward=compute)
        return path


def of_conv(self, x, **other):
    settings = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, **other}
    bias = settings.pop("bias", self.bias)
    return F.conv2d(x, settings.pop("weight", self.weight), bias, **settings)


def by_hand(self, x, eps_inside, eps_outside, correction):
    """Batch norm written out, running statistics as PyTorch keeps them."""
    mean = x.mean((0, 2, 3))
    var = x.var((0, 2, 3), correction=correction)
    with torch.no_grad():
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(x.var((0, 2, 3), correction=1), self.momentum)
    scale = self.weight / ((var + eps_inside).sqrt() + eps_outside)
    return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def three(m):
    return m.kernel_size[0] > 1 and m.stride[0] == 1


LINEAR = (nn.Conv2d, nn.Linear)
layer_kind("wrong sign", ("SmallCNN", "Recurrent"), LINEAR, after=lambda out: -out)
conv_kind("dropped bias", IMAGES, lambda s, x: of_conv(s, x, bias=None))
conv_kind("dilated kernel", IMAGES, lambda s, x: of_conv(s, x, dilation=2, padding=s.kernel_size[0] - 1), three)
conv_kind(
    "wrong stride (every second from 1)",
    ("Residual", "Colour"),
    lambda s, x: of_conv(s, x, stride=1)[:, :, 1::2, 1::2],
    lambda m: m.stride[0] == 2 and m.kernel_size[0] == 3,
)
conv_kind("transposed kernel", IMAGES, lambda s, x: of_conv(s, x, weight=s.weight.mT), three)
conv_kind("flipped kernel", IMAGES, lambda s, x: of_conv(s, x, weight=s.weight.flip(2, 3)), three)
conv_kind(
    "padding mode",
    IMAGES,
    lambda s, x: of_conv(s, F.pad(x, 2 * s.padding, mode="circular"), padding=0),
    three,
)
layer_kind("one channel off", IMAGES, nn.Conv2d, after=lambda out: out.roll(1, 1))
layer_kind("off by one pixel", IMAGES, nn.Conv2d, after=lambda out: F.pad(out, (1, 0))[..., :-1], fits=three)
layer_kind("red and blue swapped", IMAGES, nn.Conv2d, lambda x: (x.flip(1),), fits=lambda m: m.in_channels == 3)
layer_kind("dtype cut in the middle (fp16)", ("SmallCNN", "Language"), LINEAR, lambda x: (x.half().float(),))
layer_kind(
    "dtype cut in the middle (bf16)", ("Residual", "Recurrent"), LINEAR, after=lambda out: out.bfloat16().float()
)


@kind("leaky ReLU (0.01)", "Residual", "Colour")
def leaky(model, chance):
    path, module = choose(model, chance, nn.ReLU)
    override(module, forward=lambda self, x: F.leaky_relu(x, 0.01))
    return path


@kind("tanh GELU", "Language")
def tanh_gelu(model, chance):
    path, module = choose(model, chance, nn.GELU)
    module.approximate = "tanh"
    return path


norm_kind("eps outside the root", lambda s, x: by_hand(s, x, 0.0, s.eps, 0))
norm_kind("unbiased variance", lambda s, x: by_hand(s, x, s.eps, 0.0, 1))


@kind("eps 1e-3, not 1e-5", "Residual", "Language", "Colour")
def wrong_eps(model, chance):
    path, module = choose(model, chance, (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm))
    module.eps = 1e-3
    return path


@kind("momentum of batch norm", "Residual")
def momentum(model, chance):
    path, module = choose(model, chance, nn.BatchNorm2d)
    module.momentum = 0.9
    return path


@kind("batch norm in evaluation mode", "Residual")
def frozen(model, chance):
    path, module = choose(model, chance, nn.BatchNorm2d)
    module.eval()
    return path


@kind("stale buffer", "Residual (evaluation)", "Residual")
def stale(model, chance):
    path, module = choose(model, chance, nn.BatchNorm2d)
    module.running_var.fill_(1.0)
    return path


@kind("groups of group norm", "Colour")
def groups(model, chance):
    path, module = choose(model, chance, nn.GroupNorm)
    module.num_groups = 4
    return path


@kind("average for maximum pooling", "SmallCNN")
def averages(model, chance):
    path, module = choose(model, chance, nn.MaxPool2d)
    override(module, forward=lambda self, x: F.avg_pool2d(x, 2))
    return path


@kind("mean over n - 1", "Residual")
def wrong_mean(model, chance):
    path, module = choose(model, chance, nn.AdaptiveAvgPool2d)
    override(module, forward=lambda s, x: x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3] - 1))
    return path


@kind("align_corners", "Colour")
def corners(model, chance):
    path, module = choose(model, chance, nn.Upsample)
    module.align_corners = True
    return path


@kind("shortcut left out", "Residual")
def no_shortcut(model, chance):
    path, module = choose(model, chance, Block)
    override(module, forward=lambda s, x: s.act(s.bn2(s.conv2(s.act(s.bn1(s.conv1(x))))) + 0 * s.shortcut(x)))
    return path


def attention_kind(name: str, scores: Callable):
    @kind(name, "Language")
    def plant(model, chance):
        path, module = choose(model, chance, Attention)

        def forward(self, x):
            q, k, v = self.split(x)
            weights = scores(q, k, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device))
            return self.merge((weights @ v).transpose(1, 2).flatten(2))

        override(module, forward=forward)
        return path


def masked(q, k, ahead):
    return (q @ k.transpose(-1, -2)).masked_fill(ahead, float("-inf"))


attention_kind("attention without scale", lambda q, k, one: masked(q, k, one.triu(1)).softmax(-1))
attention_kind("causal mask off by one", lambda q, k, one: masked(q * q.shape[-1] ** -0.5, k, one.triu(2)).softmax(-1))
attention_kind(
    "softmax over the wrong dimension",
    lambda q, k, one: (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 - 1e9 * one.triu(1)).softmax(-2),
)


@kind("heads not transposed back", "Language")
def heads(model, chance):
    path, module = choose(model, chance, Attention)

    def forward(self, x):
        q, k, v = self.split(x)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True).flatten(1, 2).reshape(x.shape))

    override(module, forward=forward)
    return path


@kind("positions off by one", "Language")
def positions(model, chance):
    override(model, place=lambda s, tokens: (torch.arange(tokens.shape[1], device=tokens.device) + 1) % 10)
    return ""


@kind("swapped gates", "Recurrent")
def swapped(model, chance):
    path, module = choose(model, chance, Cell)
    base = type(module).gates

    def gates(self, x, h):
        i, f, g, o = base(self, x, h)
        return f, i, g, o

    override(module, gates=gates)
    return path


@kind("off-by-one slice", "Recurrent")
def slice_off(model, chance):
    base = type(model).forward
    override(model, forward=lambda self, x: base(self, torch.cat([x[:, :1], x[:, :-1]], 1)))
    return ""


@kind("dropout p", "Language")
def dropout(model, chance):
    path, module = choose(model, chance, nn.Dropout)
    module.p = 0.2
    return path


@kind("detached branch", "Residual", "Colour", "Language")
def detached(model, chance):
    path, module = choose(model, chance, (nn.Conv2d, nn.LayerNorm, nn.GELU))
    changed(module, after=torch.Tensor.detach)
    return path


@kind("detached shortcut", "Residual")
def detached_shortcut(model, chance):
    path, module = choose(model, chance, Block)

    def forward(self, x):
        return self.act(self.bn2(self.conv2(self.act(self.bn1(self.conv1(x))))) + self.shortcut(x).detach())

    override(module, forward=forward)
    return path


class Scaled(torch.autograd.Function):
    """Identity whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class OnlyPositive(Scaled):
    """Identity whose gradient loses its negative part, as of an activation with a wrong backward."""

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(min=0)


layer_kind("gradient scaled twice", ("Residual", "Language", "Recurrent"), LINEAR, after=Scaled.apply)
layer_kind("wrong custom backward", ("Language",), nn.GELU, after=OnlyPositive.apply)


@kind("bias that does not train", "SmallCNN", "Colour")
def frozen_bias(model, chance):
    path, module = choose(model, chance, nn.Conv2d)
    override(module, forward=lambda s, x: of_conv(s, x, bias=s.bias.detach()))
    return path


@kind("weights not tied", "Language")
def untied(model, chance):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return "embed|head"


@kind("input changed in place", "Residual")
def in_place(model, chance):
    """The shortcut of a block without a convolution of its own gets what the first convolution's scaling left."""
    path, module = choose(model, chance, Block, lambda m: isinstance(m.shortcut, nn.Identity))

    def forward(self, x):
        x = x * 1.0
        first = self.conv1(x)
        return self.act(self.bn2(self.conv2(self.act(self.bn1(first)))) + self.shortcut(x.clamp_(max=0.5)))

    override(module, forward=forward)
    return path


@kind("not a number", "Colour")
def not_a_number(model, chance):
    path, module = choose(model, chance, nn.ReLU)
    changed(module, after=lambda out: out + (out - out.detach().max()).abs().log().clamp(max=0) * 0)
    return path
