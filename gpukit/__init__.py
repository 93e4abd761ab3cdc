"""gpukit: move PyTorch training to a GPU or TPU, and trust it afterwards.

The names below are loaded when first used, so that `import gpukit` imports no torch: on a machine whose packages are
broken, `gpukit.detect()` must still be able to say so.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "detect": "machine.runtime",
    "Runtime": "machine.runtime",
    "setup": "machine.setup",
    "seed_everything": "machine.seeds",
    "load_dataset": "training.data",
    "loader": "training.loader",
    "prefetch": "training.prefetch",
    "time_feeding": "training.feeding",
    "Feeding": "training.feeding",
    "watch_device": "training.monitor",
    "Usage": "training.usage",
    "fit": "training.loop",
    "History": "training.history",
    "memory_report": "training.memory",
    "MemoryReport": "training.memory",
    "trace_memory": "training.memory_trace",
    "estimate_memory": "training.estimate",
    "MemoryEstimate": "training.estimate",
    "find_batch_size": "training.batch_size",
    "BatchSizeSearch": "training.batch_size",
    "watch_gradients": "training.gradients",
    "GradientReport": "training.gradient_report",
    "clip_gradients": "training.clipping",
    "init_kaiming": "training.init",
    "half_inference": "training.half",
    "Experiment": "study.experiment",
    "Result": "study.experiment",
    "run": "study.experiment",
    "compare": "study.compare",
    "Comparison": "study.compare",
    "seed_study": "study.seed_study",
    "SeedStudy": "study.seed_study",
    "compare_devices": "study.parity",
    "ParityReport": "study.parity",
    "export_onnx": "deploy.onnx",
    "export_program": "deploy.program",
    "quantize": "deploy.compare",
    "compile_tensorrt": "deploy.compare",
    "compare_exports": "deploy.compare",
    "ExportComparison": "deploy.report",
}
_MODULES = {"models": "training.models", "metrics": "training.metrics"}

__all__ = [*_WHERE, *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        value = importlib.import_module(f"gpukit.{_MODULES[name]}")
    elif name in _WHERE:
        value = getattr(importlib.import_module(f"gpukit.{_WHERE[name]}"), name)
    else:
        raise AttributeError(f"module 'gpukit' has no attribute {name!r}")
    globals()[name] = value
    return value


def load_ipython_extension(shell) -> None:
    """`%load_ext gpukit`: the cell magics, for a notebook that does not call `setup()`."""
    importlib.import_module("gpukit.frontend.magics").register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
