"""What Colab and Kaggle read from a notebook's metadata: the accelerator to start it on, and the folded first cell."""

from typing import Any

from gpukit.errors import unknown_name

ACCELERATORS = ("none", "gpu", "tpu")
# Keys as the two write them into notebooks that are saved there. Colab names the kind of TPU in gpuType, too.
_COLAB = {"gpu": ("GPU", "T4"), "tpu": ("TPU", "V5E1")}
_KAGGLE = {"none": "none", "gpu": "nvidiaTeslaT4", "tpu": "tpuV5e8"}

# In this order: Colab, Kaggle, JupyterLab and nbval (the line that the cell prints names a folder).
FOLDED = {
    "cellView": "form",
    "_kg_hide-input": True,
    "jupyter": {"source_hidden": True},
    "tags": ["nbval-ignore-output"],
}


def accelerator_of(metadata: dict[str, Any]) -> str | None:
    """The one of ACCELERATORS that a notebook's metadata asks for; None where it says nothing."""
    return _kind(metadata.get("accelerator")) or _kind(_part(metadata, "kaggle").get("accelerator"))


def with_accelerator(metadata: dict[str, Any], name: str, internet: bool) -> dict[str, Any]:
    """A copy of the metadata that starts the notebook on this accelerator, in Colab and in Kaggle.

    A model that the notebook names itself (an A100, say) stays where the kind stays. `internet` is what Kaggle is asked
    for where the notebook does not say.
    """
    if name not in ACCELERATORS:
        raise unknown_name("accelerator", name, ACCELERATORS)
    colab, kaggle = _part(metadata, "colab"), _part(metadata, "kaggle")
    if _kind(metadata.get("accelerator")) != name:
        colab.pop("gpuType", None)
    if _kind(kaggle.get("accelerator")) != name:
        kaggle.pop("accelerator", None)
    changed = {key: value for key, value in metadata.items() if key != "accelerator"}
    if name in _COLAB:
        changed["accelerator"], model = _COLAB[name]
        colab.setdefault("gpuType", model)
    kaggle["isGpuEnabled"] = name == "gpu"
    standard = {"dataSources": [], "isInternetEnabled": internet, "language": "python", "sourceType": "notebook"}
    changed["colab"] = {"provenance": []} | colab
    changed["kaggle"] = standard | {"accelerator": _KAGGLE[name]} | kaggle
    return changed


def _kind(accelerator: Any) -> str | None:
    """ "gpu" for Colab's "GPU" and Kaggle's "nvidiaTeslaT4"; None for what is neither's."""
    starts = (("none", "none"), ("gpu", "gpu"), ("nvidia", "gpu"), ("tpu", "tpu"))
    return next((kind for start, kind in starts if str(accelerator or "").lower().startswith(start)), None)


def _part(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    part = metadata.get(key)
    return dict(part) if isinstance(part, dict) else {}
