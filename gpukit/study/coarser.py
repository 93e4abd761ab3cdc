"""Whether what looks like faults is the rounding of a coarser format than was asked for.

Tensor cores multiply float32 in TF32 where that is allowed, and TPUs in bfloat16: then every product of a model is off
by that much, and nothing else is.
"""

from dataclasses import replace

import torch

from gpukit.study.one_step import BACKWARD, OUTSIDE, STEP, StepFailed, Work, on_reference
from gpukit.study.operations import TF32_ROUNDOFF, UNIT_ROUNDOFF
from gpukit.study.parity_report import Measured
from gpukit.study.parting import BAD, Comparison, everything
from gpukit.study.trace import Call

# The share of the products that must be off before a format is blamed, and the fewest of them.
SHARE, FEWEST = 0.8, 2
FORMATS = {"tf32": TF32_ROUNDOFF, "bf16": UNIT_ROUNDOFF[torch.bfloat16]}


def coarser_format(work: Work, comparison: Comparison, went: list[tuple[Call, Measured]], precision: str, wide) -> str:
    """ "tf32" or "bf16" if products in that format explain everything that parts in fp32 or tf32; else ""."""
    products = comparison.base.products - {OUTSIDE, BACKWARD, STEP}
    bad = {call for call, measured in went if measured.verdict in BAD}
    if precision not in ("fp32", "tf32") or not products or not bad <= products:
        return ""
    if len(bad) < SHARE * len(products) or (len(products) < FEWEST and work.against is not work.model):
        return ""
    for name, unit in FORMATS.items():
        formats = replace(comparison.device.formats, products=unit)
        try:
            draws = [on_reference(work, comparison.device.record, formats, number, wide) for number in (1, 2)]
        except StepFailed:
            continue  # the model's code stops at errors of that size, at which the device did not
        again = Comparison(comparison.device, comparison.base, draws, comparison.renamed)
        if not any(measured.verdict in BAD for _, measured in everything(again)):
            return name
    return ""
