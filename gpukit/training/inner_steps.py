"""Which calls of an optimiser's step are parts of another: torch calls its hooks for each of them."""

import inspect

import torch

# By its name: torch.compile puts other code into the frame.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(len).__code__.co_qualname


@torch._disable_dynamo
def is_inner(optimizer: torch.optim.Optimizer) -> bool:
    """In a hook: whether another step of the same parameters made this call, by super().step() or around another.

    Read from the stack: a count of calls would be wrong for good after a step that raised.
    """
    frame, stepping = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code.co_qualname == _HOOKED_STEP:
            stepping.append(frame.f_locals["args"][0])
        frame = frame.f_back
    return any(not _held(other).isdisjoint(_held(optimizer)) for other in stepping[1:])


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
