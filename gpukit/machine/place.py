"""Where a program runs (the place), and what shows its output (the front end). These are two questions: a kernel in
Colab may be driven from VS Code."""

from gpukit.machine.world import World

PLACES = {
    "local": "this computer",
    "colab": "Colab",
    "kaggle": "Kaggle",
    "colab-enterprise": "Colab Enterprise",
    "vertex-workbench": "Vertex AI Workbench",
    "codespaces": "GitHub Codespaces",
    "binder": "Binder",
    "lightning-studio": "Lightning AI Studio",
    "paperspace": "Paperspace Gradient",
    "studio-lab": "SageMaker Studio Lab",
}

FRONTENDS = {
    "colab-web": "Colab in the browser",
    "kaggle-web": "Kaggle's editor",
    "vscode": "VS Code",
    "jupyter": "Jupyter",
    "terminal": "terminal",
    "script": "script",
}

_BINDER = ("BINDER_LAUNCH_HOST", "BINDER_REPO_URL", "BINDER_REQUEST", "BINDER_REF_URL", "BINDER_PERSISTENT_REQUEST")
_VERTEX = {"COLAB_ENTERPRISE": "colab-enterprise", "WORKBENCH_INSTANCE": "vertex-workbench"}


def is_colab_kernel(world: World) -> bool:
    """Whether the shell is Colab's own class."""
    return "google.colab" in str(world.shell)


def find_place(world: World) -> str:
    """One of PLACES."""
    env = world.environ
    # Kaggle first: its images are built from Colab's and carry COLAB_RELEASE_TAG and google.colab. This variable
    # exists only inside a session; KAGGLE_USERNAME and KAGGLE_KEY are credentials that lie on laptops.
    if env.get("KAGGLE_KERNEL_RUN_TYPE"):
        return "kaggle"
    if env.get("VERTEX_PRODUCT") in _VERTEX:
        return _VERTEX[env["VERTEX_PRODUCT"]]
    # The virtual machine sets the latter two at run time, so they also tell in a child such as `!python train.py`.
    # COLAB_GPU does not: it is there but empty on a CPU.
    if is_colab_kernel(world) or env.get("COLAB_JUPYTER_IP") or env.get("COLAB_BACKEND_VERSION"):
        return "colab"
    if env.get("CODESPACES", "").lower() == "true" or env.get("CODESPACE_NAME"):
        return "codespaces"
    if any(env.get(name) for name in _BINDER):
        return "binder"
    if env.get("LIGHTNING_CLOUD_SPACE_ID") or world.exists("/teamspace/studios/this_studio"):
        return "lightning-studio"
    if env.get("PAPERSPACE_NOTEBOOK_REPO_ID") or env.get("PAPERSPACE_CLUSTER_ID"):
        return "paperspace"
    if world.home.rstrip("/") == "/home/studio-lab-user":
        return "studio-lab"
    return "local"


def is_notebook(world: World) -> bool:
    """Whether this is a Jupyter kernel. Spyder's console is one by class, but shows no HTML."""
    names = [cls.__name__ for cls in type(world.shell).__mro__]
    return "ZMQInteractiveShell" in names and "SpyderShell" not in names


def find_frontend(world: World, place: str) -> str:
    """One of FRONTENDS."""
    if not is_notebook(world):
        return "terminal" if world.shell is not None or world.repl else "script"
    # Set by VS Code's own notebook editor. VSCODE_PID says nothing: a Jupyter server started from VS Code's terminal
    # hands it on to every kernel.
    if "__vsc_ipynb_file__" in getattr(world.shell, "user_ns", {}):
        return "vscode"
    # Only Colab's page sets the notebook's id; without it a Colab kernel is driven from elsewhere.
    if place == "colab" and world.environ.get("COLAB_NOTEBOOK_ID"):
        return "colab-web"
    if place == "colab-enterprise" and is_colab_kernel(world):
        return "colab-web"
    if place == "kaggle":
        return "kaggle-web"
    return "jupyter"


def is_interactive(world: World) -> bool:
    """Whether a person is likely to sit in front of it. Kaggle's "Save & Run All" says that nobody does."""
    if world.environ.get("KAGGLE_KERNEL_RUN_TYPE", "").lower() == "batch":
        return False
    return world.shell is not None or world.repl
