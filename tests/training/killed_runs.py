"""A training that is killed twenty times, by SIGKILL at seeded moments, and one that is not: run as a script.

The processes are forked from one that has imported torch and trained a little; nothing in it runs in threads.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from resuming import flat
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpukit.training.checkpoint_file import CheckpointFile
from gpukit.training.loop import fit

KILLS = 20
PAUSE_SECONDS = 0.0005  # between two looks: a watcher that never rests takes the core from what it watches
WRITE_SECONDS = 0.01


class Noisy(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.randn(6) + index % 2, index % 2


def train(path, epochs=3):
    """Three epochs of 40 steps, saved after each, with a buffer that makes a save take as long as a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
    model.register_buffer("ballast", torch.rand(1 << 19))
    made = []

    def optimizer(parameters):
        made.append(torch.optim.AdamW(parameters, lr=0.01))
        return made[0]

    history = fit(
        model,
        DataLoader(Noisy(), batch_size=4, shuffle=True),
        epochs=epochs,
        valid=DataLoader(Noisy(), batch_size=80),
        optimizer=optimizer,
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 3),
        device="cpu",
        precision="fp32",
        progress=False,
        checkpoint=path,
        checkpoint_minutes=1e-9,
    )
    told = [[e.steps, e.samples, e.train_loss, e.valid_loss, e.learning_rate, e.metrics] for e in history.epochs]
    return {"model": model.state_dict(), "optimizer": made[0].state_dict(), "told": told}


def started(work):
    child = os.fork()
    if not child:
        code = 1
        try:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child):
    return os.waitpid(child, os.WNOHANG)[0] == child


def wait_until(what, child):
    """Whether `what()` came true before the child ended."""
    while not what():
        if ended(child):
            return False
        time.sleep(PAUSE_SECONDS)
    return True


def kill_somewhere(child, path, chance):
    """Kill the child at its start, between two writes or in one; False where it had ended by itself."""
    beside = path.with_name(f".{path.name}.partial")

    def version():
        try:
            return path.stat().st_ino
        except FileNotFoundError:  # not yet, or between its two renames
            return None

    where = chance.choice(["start", "between", "write", "write"])
    if where == "start":
        time.sleep(chance.uniform(0, 0.1))
    else:
        for _ in range(chance.randint(1, 4)):
            seen = version()
            if not wait_until(lambda seen=seen: version() != seen, child):
                return False
        if where == "write" and not wait_until(beside.exists, child):
            return False
        time.sleep(chance.uniform(0, WRITE_SECONDS))
    if ended(child):
        return False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main(folder):
    torch.set_num_threads(1)
    train(folder / "warm.pt", epochs=1)  # everything is imported and checked before the first fork
    path, chance = folder / "run.pt", random.Random(0)
    kills = in_a_write = unsafe = 0
    while kills < KILLS:
        child = started(lambda: train(path))
        if not kill_somewhere(child, path, chance):
            break
        kills += 1
        in_a_write += path.with_name(f".{path.name}.partial").exists()
        file = CheckpointFile(path)
        there = [p for p in (file.path, file.previous) if p.exists()]
        unsafe += bool(there) and all(file.damage(p) for p in there)
    for name in ("run.pt", "whole.pt"):
        result = folder / f"result of {name}"
        child = started(lambda name=name, result=result: torch.save(train(folder / name), result))
        assert os.waitpid(child, 0)[1] == 0, name
    found, expected = (flat(torch.load(folder / f"result of {name}")) for name in ("run.pt", "whole.pt"))
    other = [name for name in expected if not same(found.get(name), expected[name])]
    print(
        json.dumps(
            {"kills": kills, "in_a_write": in_a_write, "unsafe": unsafe, "values": len(expected), "other": other}
        )
    )


def same(one, other):
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


if __name__ == "__main__":
    main(Path(sys.argv[1]))
