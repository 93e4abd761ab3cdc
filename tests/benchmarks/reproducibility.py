"""What the same bits cost: seconds an epoch of FalseColourNet, with and without deterministic algorithms and workers.

    python tests/benchmarks/reproducibility.py [DEVICE] [PAIRS]

Every way trains twice with the same seed. The table says whether the two gave the same bits, whether they are the bits
of the first way, and how long an epoch took: the best of the epochs after the first of both runs, each synchronised.
"""

import hashlib
import sys

import torch
from torch import nn

import gpukit
from gpukit.machine import backend
from gpukit.machine.probe import resolve_device

EPOCHS = 3
WAYS = {
    "resident": {},
    "resident, deterministic": {"deterministic": True},
    "DataLoader, 0 workers": {"resident": False, "workers": 0},
    "DataLoader, 1 worker": {"resident": False, "workers": 1},
    "DataLoader, 2 workers": {"resident": False, "workers": 2},
    "DataLoader, 2 workers, deterministic": {"resident": False, "workers": 2, "deterministic": True},
}


def train(device, pairs, *, deterministic=False, resident=True, workers=None):
    """(bits, seconds of the epochs after the first)."""
    gpukit.seed_everything(0, deterministic=deterministic)
    model = gpukit.models.FalseColourNet()
    loader = gpukit.loader(pairs, 32, device=device, shuffle=True, seed=0, resident=resident, workers=workers)
    history = gpukit.fit(
        model, loader, epochs=EPOCHS, loss_fn=nn.MSELoss(), device=device, precision="fp32", progress=False,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=4e-4),
    )  # fmt: skip
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest(), [record.train_seconds for record in history.epochs[1:]]


def main() -> None:
    device = resolve_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    pairs, _ = gpukit.load_dataset("falsecolour")
    pairs = pairs.take(int(sys.argv[2]) if len(sys.argv) > 2 else 1_024)
    rows, reference = [], None
    for name, options in WAYS.items():
        runs = [train(device, pairs, **options) for _ in range(2)]
        reference = reference or runs[0][0]
        best = min(seconds for _, epochs in runs for seconds in epochs)
        same = "yes" if runs[0][0] == runs[1][0] else "no"
        rows.append((name, best, same, "yes" if runs[0][0] == reference else "no"))
    print(f"{device} {backend.device_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"FalseColourNet, {len(pairs):,} pairs, batch 32, fp32, best of {2 * (EPOCHS - 1)} epochs")
    print(f"{'way':38} {'s/epoch':>8} {'against the first':>18} {'same bits again':>16} {'bits of the first':>18}")
    for name, seconds, again, first in rows:
        print(f"{name:38} {seconds:8.2f} {seconds / rows[0][1]:17.2f}x {again:>16} {first:>18}")


if __name__ == "__main__":
    main()
