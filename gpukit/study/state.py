"""What two models differ in before anything is computed: weights, buffers, ties, modes."""

from collections import defaultdict

import torch
from torch import nn

from gpukit.study.parity_report import Measured


def differences(model: nn.Module, against: nn.Module) -> tuple[Measured, ...]:
    """What `against` holds otherwise than `model` under the same names, in the order of the model's modules.

    Nothing for models without a common name: they are then compared by what they give only.
    """
    if model is against:
        return ()
    types = {name: type(module).__name__ for name, module in model.named_modules()}
    ours, theirs = _state(model), _state(against)
    if ours and not ours.keys() & theirs.keys():
        return ()
    found, new_names = [], renamed(model, against)
    for name in dict.fromkeys([*ours, *theirs]):
        if name in new_names or name in new_names.values():
            continue
        if detail := _difference(name, ours.get(name), theirs.get(name)):
            found.append((name.rpartition(".")[0], "weight" if _is_weight(name, model, against) else "buffer", detail))
    ties, their_ties = _ties(model), _ties(against)
    for names in sorted(ties ^ their_ties):
        who = "the model" if names in ties else "the other"
        found.append((names[-1].rpartition(".")[0], "weight", f"{' and '.join(names)} are one tensor in {who} only"))
    modes = {name: module.training for name, module in against.named_modules()}
    for name, module in model.named_modules():
        if modes.get(name, module.training) != module.training:
            now, other = ("train", "evaluation") if module.training else ("evaluation", "train")
            found.append((name, "mode", f"{name or 'the model'} is in {now} mode, in the other model in {other} mode"))
    return tuple(
        Measured(name, types.get(name, ""), 0, what, None, None, None, "parts", detail=detail)
        for name, what, detail in found
    )


def renamed(model: nn.Module, against: nn.Module) -> dict[str, str]:
    """Names in `model` to names in `against`, of weights and buffers that have another name there and equal values."""
    if model is against:
        return {}
    ours, theirs = _state(model), _state(against)
    new = [name for name in theirs if name not in ours]
    found: dict[str, str] = {}
    for name, tensor in ours.items():
        if name in theirs:
            continue
        same = (n for n in new if n not in found.values() and not _difference(name, tensor, theirs[n]))
        if (match := next(same, None)) is not None:
            found[name] = match
    return found


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def _is_weight(name: str, *models: nn.Module) -> bool:
    return any(name in dict(model.named_parameters(remove_duplicate=False)) for model in models)


def _difference(name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> str:
    if ours is None or theirs is None:
        return f"{name} is in {'the other model' if ours is None else 'the model'} only"
    if ours.shape != theirs.shape:
        return f"{name} is {tuple(ours.shape)}, in the other model {tuple(theirs.shape)}"
    ours, theirs = ours.cpu(), theirs.cpu()
    if torch.equal(ours, theirs.to(ours.dtype)):
        return ""
    share = (ours != theirs.to(ours.dtype)).double().mean().item()
    return f"{name} has other values in the other model ({share:.1%} of its entries)"


def _ties(model: nn.Module) -> set[tuple[str, ...]]:
    """The names of each parameter that has several."""
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {tuple(found) for found in names.values() if len(found) > 1}
