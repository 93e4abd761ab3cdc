"""When gradients are called vanishing, exploding, missing, or units dead.

The papers give no numbers to judge by. These stay clear of sound networks: SmallCNN, ResNet-18, small transformers,
recurrent networks and perceptrons, trained with SGD and AdamW.
"""

from collections.abc import Iterator

from gpukit.training.gradient_report import Finding, GradientReport, Layer, dead_shares, median

# Of the largest layer's root mean square. Sound networks: above 1e-3 at their input.
VANISHING = 1e-4
# The norm of the whole gradient. Sound networks with a mean as loss: 0.001 to 100.
EXPLODING = 1e5
# Of the largest norm so far, once there are three.
SUDDEN, EARLIER = 100.0, 3
# The change of a step over the weight. About 0.001 is usual; sound networks with a high rate: up to 2 at first.
LARGE_STEP = 10.0
DEAD = 0.5

# Kind, layers, sentence, rule.
Found = Iterator[tuple[str, list[Layer], str, str]]


def findings(report: GradientReport) -> tuple[Finding, ...]:
    """What is wrong, the worst first."""
    rules = (_not_finite, _exploding, _large_step, _vanishing, _missing, _dead)
    return tuple(
        Finding(kind, tuple(layer.name for layer in layers), sentence, because)
        for rule in rules
        for kind, layers, sentence, because in rule(report)
    )


def _not_finite(report: GradientReport) -> Found:
    bad = next((r for r in report.records if r.not_finite and not r.skipped), None)
    if bad is not None:
        layers = [layer for layer in report.layers if layer.name in bad.not_finite]
        others = f", the first of {len(layers)}" * (len(layers) > 1)
        sentence = f"since step {bad.step}, or before: {bad.not_finite[layers[0].name]} in {layers[0]}{others}."
        yield "not finite", layers, sentence, "It makes NaN of every weight that it reaches."


def _exploding(report: GradientReport) -> Found:
    before: dict[frozenset[str], list[float]] = {}  # two optimisers' turns are not compared with each other
    for record in report.records:
        if record.norm is None:
            continue
        earlier = before.setdefault(frozenset(record.norms), [])
        sudden = len(earlier) >= EARLIER and record.norm > SUDDEN * max(earlier) > 0
        if sudden or record.norm > EXPLODING:
            most = [x for x in report.layers if record.norms.get(x.name, 0.0) >= 0.1 * max(record.norms.values())]
            jump = f", {record.norm / max(earlier):.0f} times the largest before" if sudden else ""
            yield (
                "exploding",
                most,
                f"the whole gradient's norm is {record.norm:.1e} in step {record.step}{jump}, most in {_layers(most)}.",
                f"Above {EXPLODING:g}, or {SUDDEN:.0f} times the largest before (Pascanu et al. 2013, section 2): "
                "first weights too large (He et al. 2015, section 2.2), a sum as loss, targets in the thousands.",
            )
            return
        earlier.append(record.norm)


def _large_step(report: GradientReport) -> Found:
    found: dict[Layer, tuple[float, int]] = {}
    for layer in report.layers:
        name = layer.name
        steps = [(r.ratios[name], r.step) for r in report.records if name in r.ratios]
        # A weight that starts at zero, and later is small, has a large ratio by right.
        zero = any(name in r.norms and name not in r.ratios for r in report.records)
        if steps and not zero and max(steps)[0] > LARGE_STEP:
            found[layer] = max(steps)
    if found:
        worst = max(found, key=found.get)
        ratio, step = found[worst]
        sentence = f"step {step} changes {worst} by {ratio:.1e} times the weights' own size"
        others = f"; {_layers(list(found))} by more than {LARGE_STEP:.0f} times in some step" * (len(found) > 1)
        yield "large step", list(found), f"{sentence}{others}.", "The learning rate is too large for this gradient."


def _vanishing(report: GradientReport) -> Found:
    sizes = {layer: size for layer in report.layers if (size := median(report.rms(layer))) is not None}
    largest = max(sizes, key=sizes.get, default=None)
    vanished = []
    for layer, size in sizes.items():
        # Only what lies before everything that has a gradient: one small layer beside a shortcut holds nothing up.
        if size and size >= VANISHING * sizes[largest]:
            break
        vanished.append(layer)
    if vanished:
        yield (
            "vanishing",
            vanished,
            f"hardly any gradient arrives in {_layers(vanished)}, the first of {len(sizes)}: root mean square "
            f"{sizes[vanished[0]]:.1e} in {vanished[0]}, {sizes[largest]:.1e} in {largest}.",
            f"Less than {VANISHING:g} of the largest layer's, median of the watched steps. They should keep their size "
            "from layer to layer (Glorot and Bengio 2010, section 4.2).",
        )


def _missing(report: GradientReport) -> Found:
    there = {name for record in report.records for name in (*record.norms, *record.not_finite)}
    missing = {name for record in report.records for name in record.missing} - there
    if layers := [layer for layer in report.layers if layer.name in missing]:
        rule = "The loss does not depend on it: forward() does not use it, or something detaches."
        yield "missing", layers, f"{_layers(layers)} had no gradient in any watched step.", rule


def _dead(report: GradientReport) -> Found:
    shares = dead_shares(report.records[len(report.records) // 2 :])
    if found := {name: share for name, share in shares.items() if share > DEAD}:
        worst = max(found, key=found.get)
        yield (
            "dead",
            [Layer(name, "ReLU", 0) for name in found],
            f"most units of {len(found)} of {len(shares)} ReLUs are zero for every sample of a batch: "
            f"{found[worst]:.0%} in {worst}.",
            f"More than {DEAD:.0%}, median of the later watched steps. Without a gradient a unit may never come back "
            "(Lu et al. 2019, section 1).",
        )


def _layers(layers: list[Layer]) -> str:
    return ", ".join(map(str, layers)) if len(layers) <= 3 else f"{len(layers)} layers, {layers[0]} to {layers[-1]}"
