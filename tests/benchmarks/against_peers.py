"""How fast `gpukit.fit` trains the network of the experiment, against a loop by hand and the libraries people use.

    pip install lightning accelerate pytorch-ignite skorch      # for this benchmark only; what is missing is left out
    python tests/benchmarks/against_peers.py [--device cpu] [--rounds 15] [--images 1280] [--data PATH] [--json FILE]

Same network, images, batch size, optimiser and order for all. The published loop and the four libraries take their
batches from a DataLoader over PIL images with ToTensor, as published; gpukit and the tight loop from resident data.
The contenders take turns, one epoch each a round, so that a slow minute of a shared machine hits all of them; a ratio
is the median over the rounds of the ratio within a round. Only the training pass counts: no set-up, no validation.
"""

import argparse
import contextlib
import io
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

import gpukit
from gpukit.files import write_whole
from gpukit.machine import backend, probe
from gpukit.training import recorder
from gpukit.training.models import SmallCNN
from gpukit.training.precision import Precision

# Lightning's and Ignite's own lines say nothing here, and would stand between those of this program.
QUIET = ("lightning.pytorch", "lightning.fabric", "lightning", "pytorch_lightning", "ignite", "gpukit")
BATCH = 64
LEARNING_RATE = 0.01
Epoch = Callable[[], float]  # trains one epoch, returns its seconds


class Nothing(nn.Module):
    """A network with next to nothing to compute: what a step still takes is the loop's own doing."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 0, :10] + self.bias


def fresh(device: torch.device, network: type[nn.Module] = SmallCNN) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = network().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def published(dataset, device) -> Epoch:
    model, optimizer = fresh(device)
    loader = DataLoader(dataset.as_pil(ToTensor()), batch_size=BATCH)
    loss_fn = nn.CrossEntropyLoss()

    def epoch() -> float:
        began = time.perf_counter()
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            loss = loss_fn(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % 100 == 0:
                loss.item()
        backend.synchronize(device)
        return time.perf_counter() - began

    return epoch


def tight(dataset, device, name: str, network: type[nn.Module] = SmallCNN) -> Epoch:
    """Nothing but the training step, on batches that lie ready on the device as floats."""
    model, optimizer = fresh(device, network)
    precision = Precision(name, device.type)
    if precision.likes_channels_last:
        model.to(memory_format=torch.channels_last)
    loss_fn = nn.CrossEntropyLoss()
    batches = list(gpukit.loader(dataset, BATCH, device=device, normalize=False))

    def epoch() -> float:
        with precision.applied():
            backend.synchronize(device)
            began = time.perf_counter()
            for images, labels in batches:
                with precision.autocast():
                    loss = loss_fn(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            backend.synchronize(device)
            return time.perf_counter() - began

    return epoch


def fit(dataset, device, precision: str, monitored: bool = True, network: type[nn.Module] = SmallCNN) -> Epoch:
    model, optimizer = fresh(device, network)
    loader = gpukit.loader(dataset, BATCH, device=device, normalize=False)

    def epoch() -> float:
        monitor = recorder.Monitor
        if not monitored:
            recorder.Monitor = Unmonitored
        try:
            history = gpukit.fit(
                model, loader, epochs=1, optimizer=optimizer, device=device, precision=precision, progress=False
            )
        finally:
            recorder.Monitor = monitor
        return history.epochs[0].train_seconds

    return epoch


class Unmonitored:
    usage = None

    def __init__(self, device):
        pass

    def start(self):
        pass

    def stop(self):
        return None, None


def lightning(dataset, device) -> Epoch:
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model, self.loss_fn = SmallCNN(), nn.CrossEntropyLoss()

        def training_step(self, batch, index):
            return self.loss_fn(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    class Clock(Callback):
        def on_train_epoch_start(self, *_):
            self.began = time.perf_counter()

        def on_train_epoch_end(self, *_):
            backend.synchronize(device)
            self.seconds = time.perf_counter() - self.began

    module, clock = Module(), Clock()
    loader = DataLoader(dataset.as_pil(ToTensor()), batch_size=BATCH)

    def epoch() -> float:
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu" if device.type == "cpu" else "auto",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[clock],
        )
        trainer.fit(module, loader)
        return clock.seconds

    return epoch


def accelerate(dataset, device) -> Epoch:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device.type == "cpu")
    model, optimizer = fresh(torch.device("cpu"))
    loader = DataLoader(dataset.as_pil(ToTensor()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_fn = nn.CrossEntropyLoss()

    def epoch() -> float:
        began = time.perf_counter()
        for images, labels in loader:
            loss = loss_fn(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        backend.synchronize(device)
        return time.perf_counter() - began

    return epoch


def ignite(dataset, device) -> Epoch:
    from ignite.engine import Events, create_supervised_trainer

    model, optimizer = fresh(device)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=device)
    loader = DataLoader(dataset.as_pil(ToTensor()), batch_size=BATCH)
    times = []
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: times.append(time.perf_counter()))

    @trainer.on(Events.EPOCH_COMPLETED)
    def _():
        backend.synchronize(device)
        times.append(time.perf_counter() - times.pop())

    def epoch() -> float:
        trainer.run(loader, max_epochs=1)
        return times.pop()

    return epoch


def skorch(dataset, device) -> Epoch:
    from skorch import NeuralNet

    torch.manual_seed(0)
    net = NeuralNet(
        SmallCNN,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=LEARNING_RATE,
        batch_size=BATCH,
        device=str(device),
        train_split=None,
        callbacks__print_log=None,
        verbose=0,
    ).initialize()
    data = dataset.as_pil(ToTensor())

    def epoch() -> float:
        net.partial_fit(data, y=None, epochs=1)
        return net.history[-1, "dur"]

    return epoch


def loader_alone(dataset, device) -> Epoch:
    loader = gpukit.loader(dataset, BATCH, device=device, shuffle=True, normalize=True)

    def epoch() -> float:
        began = time.perf_counter()
        for _ in loader:
            pass
        backend.synchronize(device)
        return time.perf_counter() - began

    return epoch


def contenders(dataset, device: torch.device) -> dict[str, Epoch]:
    check = probe.check_device(str(device))
    half = next((n for n in ("bf16", "fp16") if n in check.precisions and check.precisions[n].native), None)
    made: dict[str, Epoch] = {"published loop": published(dataset, device)}
    for peer in (lightning, accelerate, ignite, skorch):
        try:
            made[peer.__name__] = peer(dataset, device)
        except ImportError:
            print(f"{peer.__name__} is not installed: left out")
    for name in ("fp32", half) if half else ("fp32",):
        made[f"tight loop, {name}"] = tight(dataset, device, name)
        made[f"gpukit.fit, {name}"] = fit(dataset, device, name)
    made["gpukit.fit, fp32, not monitored"] = fit(dataset, device, "fp32", monitored=False)
    made["tight loop, nothing to compute"] = tight(dataset, device, "fp32", network=Nothing)
    made["gpukit.fit, nothing to compute"] = fit(dataset, device, "fp32", network=Nothing)
    made["the same, not monitored"] = fit(dataset, device, "fp32", monitored=False, network=Nothing)
    made["gpukit.loader alone"] = loader_alone(dataset, device)
    return made


def measure(made: dict[str, Epoch], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, epoch in made.items():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                taken = epoch()
            if number:  # the first round warms up
                seconds[name].append(taken)
        print(f"\rround {number} of {rounds}", end="", flush=True)
    print()
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> tuple[float, float, float]:
    """Median and quartiles, over the rounds, of how many times as fast `fast` was."""
    ratios = [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return median, low, high


def more(seconds: dict[str, list[float]], name: str, base: str) -> str:
    middle, low, high = (100 * (value - 1) for value in ratio(seconds, name, base))
    return f"{middle:+.1f} % of the time ({low:+.1f} to {high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=1280)
    parser.add_argument("--data", default="fashion")
    parser.add_argument("--json", help="also write all times to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)

    device = probe.resolve_device(options.device)
    dataset = gpukit.load_dataset(options.data)[0].take(options.images)
    seconds = measure(contenders(dataset, device), options.rounds)

    print(f"SmallCNN, {options.images:,} images of {options.data}, batch {BATCH}, SGD; {options.rounds} rounds")
    print(f"{device} {backend.device_name(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(f"{'':34}{'images/s':>9}  against the published loop (quartiles)")
    for name, times in seconds.items():
        rate = options.images / statistics.median(times)
        middle, low, high = ratio(seconds, "published loop", name)
        print(f"{name:34}{rate:>9,.0f}  {middle:5.2f}  ({low:.2f} to {high:.2f})")
    print()
    for name in [name.removeprefix("tight loop, ") for name in seconds if name.startswith("tight loop")]:
        print(f"fit against the tight loop, {name}: {more(seconds, f'gpukit.fit, {name}', f'tight loop, {name}')}")
    print(f"monitoring: {more(seconds, 'gpukit.fit, fp32', 'gpukit.fit, fp32, not monitored')}")
    steps, step = -(-options.images // BATCH), statistics.median(seconds["gpukit.fit, fp32"])
    for what, name, base in (
        ("loader, moves, sums and records", "gpukit.fit, nothing to compute", "tight loop, nothing to compute"),
        ("monitoring", "gpukit.fit, nothing to compute", "the same, not monitored"),
        ("the resident loader, shuffling and normalising", "gpukit.loader alone", None),
    ):
        bases = seconds[base] if base else [0.0] * options.rounds
        added = statistics.median(a - b for a, b in zip(seconds[name], bases, strict=True))
        print(
            f"{what}: {1e6 * added / steps:,.0f} microseconds a step, {100 * added / step:.2f} % of one of fit in fp32"
        )
    if options.json:
        write_whole(options.json, json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
