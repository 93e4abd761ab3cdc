"""Training and evaluation mode, put back as they were."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put every module's mode back at the end: a part may have been set to `eval()` by hand, its whole not."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
