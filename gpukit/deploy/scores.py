"""How well each form of a model does on data."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from gpukit.deploy.call import call_of, device_of
from gpukit.deploy.forms import Built
from gpukit.notices import say
from gpukit.training.batch import batch_samples, split_batch
from gpukit.training.tally import accuracy

Metric = Callable[[Any, Any], torch.Tensor]


class Scores(NamedTuple):
    """Means over the samples, by form: of the metric, and of whether the class is the one that the model gives."""

    name: str = ""
    samples: int = 0
    means: Mapping[str, float] = {}
    same_class: Mapping[str, float] = {}


def score(model: nn.Module, forms: Mapping[str, Built], valid: Iterable | None, metric: Metric | None) -> Scores:
    """Each batch of `valid` through every form, the model first: accuracy, or `metric(output, target)` if given.

    `output` is a tensor in float32 on the CPU, or a list of several. Targets that are no classes need a metric.
    """
    sums, same, samples = dict.fromkeys(forms, 0.0), dict.fromkeys(forms, 0.0), 0
    for batch in valid if valid is not None else ():
        inputs, target = split_batch(batch)
        call, count = call_of(model, inputs).to(device_of(model)), batch_samples(inputs, target)
        target = target.cpu() if isinstance(target, torch.Tensor) else target
        first = None
        for name, form in forms.items():
            output = [tensor.float().cpu() for tensor in call.run_copy(form.run)]
            output = output[0] if len(output) == 1 else output
            if metric is None and not _is_classification(output, target):
                say("no accuracy: the model's output and the targets are no classes; metric= takes what measures them")
                return Scores()
            sums[name] += float((metric or accuracy)(output, target)) * count
            if metric is None:
                first = output.argmax(1) if first is None else first
                same[name] += (output.argmax(1) == first).float().mean().item() * count
        samples += count
    if not samples:
        return Scores()
    means, shares = ({name: total / samples for name, total in totals.items()} for totals in (sums, same))
    if metric is None:
        return Scores("accuracy", samples, means, shares)
    return Scores(getattr(metric, "__name__", "metric"), samples, means)


def _is_classification(output: Any, target: Any) -> bool:
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)) or target.is_floating_point():
        return False
    return output.dim() > 1 and output.shape[:1] + output.shape[2:] == target.shape
