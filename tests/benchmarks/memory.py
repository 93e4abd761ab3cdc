"""The estimate of a step's memory against what then happened, measured on the CPU.

    python tests/benchmarks/memory.py                       # every case
    python tests/benchmarks/memory.py small 64 32 adamw     # one: network, batch size, image size, optimiser

What happened is read off PyTorch's own CPU allocator: the profiler notes each allocation and each release, those inside
kernels (oneDNN's scratch) among them; their running sum has the peak. Three training steps run in a process of their
own, so that nothing is left over. Beside it stands what the process's RAM grew by (ru_maxrss), which also holds
libraries that are loaded on the way, threads' stacks, and what malloc keeps.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    ("small", 16, 32, "sgd"),
    ("small", 64, 32, "sgd"),
    ("small", 64, 32, "adamw"),
    ("small", 256, 32, "adamw"),
    ("resnet18", 2, 224, "sgd"),
    ("resnet18", 8, 224, "sgd"),
    ("resnet18", 8, 224, "adamw"),
    ("resnet18", 64, 64, "adamw"),
]


def one(network: str, batch: int, side: int, optimiser: str) -> dict:
    """Estimate, then measure, in this process."""
    import resource

    import torch
    from torch.nn import functional as F
    from torch.profiler import ProfilerActivity, profile

    import gpukit

    def build():
        torch.manual_seed(0)
        if network == "small":
            return gpukit.models.SmallCNN()
        from torchvision.models import resnet18

        return resnet18(num_classes=10)

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.01) if optimiser == "sgd" else torch.optim.AdamW(parameters, lr=0.001)

    def steps(count: int, images: int):
        model = build()
        stepper = make(model.parameters())
        x, y = torch.randn(images, 3, side, side), torch.zeros(images, dtype=torch.long)
        for _ in range(count):
            stepper.zero_grad()
            F.cross_entropy(model(x), y).backward()
            stepper.step()

    estimate = gpukit.estimate_memory(build(), (torch.zeros(3, side, side), 0), batch_size=batch, optimizer=make)
    steps(1, 2)  # what PyTorch sets up once is no part of the measurement
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps(3, batch)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    return {
        "case": [network, batch, side, optimiser],
        "estimated": estimate.peak_bytes,
        "happened": peak_of(profiler),
        "process_grew_by": grown,
    }


def peak_of(profiler) -> int:
    """The largest running sum of all that was allocated less all that was freed."""
    changes, nodes = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while nodes:
        node = nodes.pop()
        nodes += node.children
        size = getattr(node.extra_fields, "alloc_size", None)
        if size is not None:
            changes.append((node.start_time_ns, size))
    now = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        now += size
        peak = max(peak, now)
    return peak


def main(arguments: list[str]) -> None:
    if arguments:
        network, batch, side, optimiser = arguments
        print(json.dumps(one(network, int(batch), int(side), optimiser)))
        return
    print("network    batch  side  optimiser  estimated  happened  est/happened  process grew by (MiB)")
    for case in CASES:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, *map(str, case)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found = json.loads(done.stdout.splitlines()[-1])
        estimated, happened, grown = (found[name] / 2**20 for name in ("estimated", "happened", "process_grew_by"))
        print(
            f"{case[0]:<10} {case[1]:>5} {case[2]:>5}  {case[3]:<9} {estimated:>10.1f} {happened:>9.1f}"
            f" {estimated / happened:>13.3f} {grown:>13.1f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
