"""Under torchrun: a run of several processes that is stopped and resumed, against one that is not. Give it a folder."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from resuming import assert_same_bits, momentum, run


def main(folder):
    rank = int(os.environ["RANK"])

    def stopping(parameters):
        optimizer, steps = momentum(parameters), []

        def count(*_):
            steps.append(1)
            if len(steps) == 9 and rank == 0:
                signal.raise_signal(signal.SIGINT)

        optimizer.register_step_post_hook(count)
        return optimizer

    stopped = {}
    for name in ("gpukit.loader", "random transforms"):
        options = {"data": name, "minutes": 1e9}
        whole = run(**options, path=folder / f"whole {name}.pt")
        stopped[name] = run(**options, path=folder / f"{name}.pt", optimizer=stopping)[2].stopped
        assert_same_bits(run(**options, path=folder / f"{name}.pt", seed=5), whole)
    (folder / f"{rank}.json").write_text(json.dumps(stopped))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
