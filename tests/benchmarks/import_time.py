"""How long `import gpukit` takes, beside a bare Python: `python tests/benchmarks/import_time.py [ROUNDS]`.

Fresh processes, the two commands in turn, so that a busy moment of the machine meets both; medians and quartiles.
The first two rounds fill the disk's cache and are left out.
"""

import statistics
import subprocess
import sys
import time

COMMANDS = {"bare Python": "pass", "import gpukit": "import gpukit"}
WARM_UP = 2


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main(rounds: int = 30) -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + WARM_UP):
        for name, code in COMMANDS.items():
            taken = seconds(code)
            if number >= WARM_UP:
                times[name].append(taken)
    for name, values in times.items():
        low, middle, high = (1000 * value for value in statistics.quantiles(values, n=4))
        print(f"{name:14s} median {middle:6.1f} ms, half of {rounds} runs between {low:.1f} and {high:.1f} ms")
    pairs = zip(times["import gpukit"], times["bare Python"], strict=True)
    more = 1000 * statistics.median(ours - bare for ours, bare in pairs)
    print(f"gpukit adds    median {more:6.1f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
