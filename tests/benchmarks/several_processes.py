"""How fast `gpukit.fit` trains in several processes, against a loop by hand with DistributedDataParallel.

    python tests/benchmarks/several_processes.py [--counts 1 2] [--rounds 5] [--batches 8] [--batch-size 128]

torchrun starts each number of processes, with one thread each on a CPU. Both contenders take the same batches, meant in
all, from memory, and take turns, an epoch each, so that a slow minute of a shared machine hits both; a ratio is the
median over the rounds of the ratio within a round. `small` is the network of the experiment, `wide` has 6.3 million
parameters and little to compute for each: what is exchanged is what it shows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WORKER = "GPUKIT_BENCHMARK_WORKER"


def worker(rounds: int, batches: int, batch_size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import gpukit
    from gpukit import notices
    from gpukit.machine import backend
    from gpukit.training.models import SmallCNN

    notices.silence()
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = gpukit.setup().device
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    networks = {
        "small": SmallCNN,
        "wide": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 10)),
    }
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(batch_size, 3, 32, 32, generator=generator), torch.randint(10, (batch_size,), generator=generator))
        for _ in range(batches)
    ]
    data = [(x.to(device), y.to(device)) for x, y in data]
    images = sum(len(x) for x, _ in data)

    def by_fit(model, optimizer):
        return gpukit.fit(model, data, epochs=1, optimizer=optimizer, precision="fp32", progress=False).epochs[0]

    def by_hand(model, optimizer):
        model.train()
        for x, y in data:
            part = slice(rank * len(x) // count, (rank + 1) * len(x) // count)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()

    for name, make in networks.items():
        seconds = {"fit": [], "DDP": []}
        made = []
        for _ in range(2):
            torch.manual_seed(0)
            made.append(make().to(device))
        wrapped = DistributedDataParallel(made[1])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in made]
        for _ in range(rounds + 1):  # the first warms up
            dist.barrier()
            seconds["fit"].append(by_fit(made[0], optimizers[0]).train_seconds)
            dist.barrier()
            begin = time.perf_counter()
            by_hand(wrapped, optimizers[1])
            backend.synchronize(torch.device(device))
            seconds["DDP"].append(time.perf_counter() - begin)
        if rank == 0:
            speeds = {which: [images / s for s in taken[1:]] for which, taken in seconds.items()}
            ratio = statistics.median(a / b for a, b in zip(speeds["fit"], speeds["DDP"], strict=True))
            told = {"count": count, "network": name, "ratio": ratio}
            print(json.dumps(told | {which: statistics.median(values) for which, values in speeds.items()}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    asked = parser.parse_args()
    if WORKER in os.environ:
        worker(asked.rounds, asked.batches, asked.batch_size)
        return
    environ = {**os.environ, WORKER: "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    print("processes  network  fit images/s  DDP images/s  fit / DDP")
    for count in asked.counts:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        done = subprocess.run([*command, *sys.argv], env=environ, stdout=subprocess.PIPE, text=True, check=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                told = json.loads(line)
                print(
                    f"{told['count']:9}  {told['network']:7}  {told['fit']:12,.0f}  {told['DDP']:12,.0f}  "
                    f"{told['ratio']:9.2f}"
                )


if __name__ == "__main__":
    main()
