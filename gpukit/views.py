"""The one door from data to its views.

Histories, results and runtimes are plain data that live below `gpukit.frontend`. A reader still expects
`history.plot()`, or a card when a notebook shows a runtime. Such methods come here, and only here is a module of
`frontend` looked up, when a view is asked for: importing the data imports no matplotlib, ipywidgets or IPython.
"""

import importlib
from typing import Any


def view(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """Call `gpukit.frontend.<module>.<function>(*args, **kwargs)`."""
    return getattr(importlib.import_module(f"gpukit.frontend.{module}"), function)(*args, **kwargs)
