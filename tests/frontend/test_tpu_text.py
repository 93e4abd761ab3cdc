"""The plan for a TPU's packages as text: every part is there, and commands can be copied."""

from gpukit.frontend.tpu import installation_text, plan_text
from gpukit.machine.check import Note
from gpukit.machine.install import Change, Installation
from gpukit.machine.plan import IMPOSSIBLE, INSTALL, NOTHING, Plan
from gpukit.machine.verify import Verification

LONG = tuple(f"package-number-{number}==1.2.3" for number in range(12))


def words(text):
    return " ".join(text.split())


def test_a_plan_shows_why_with_which_commands_and_what_is_off():
    plan = Plan(
        INSTALL,
        "torch_xla is missing.",
        tpu="8 x TPU v5e",
        place="kaggle",
        requirements=LONG,
        kept=("torch==2.8.0+cpu",),
        restart=True,
        restart_reason="torch is imported already.",
        broken=(Note("torchvision 0.1 was built for another torch.", "Install its partner."),),
        notes=(Note("jax is here.", "Use one."),),
    )
    text = plan_text(plan)
    assert text == str(plan)
    assert "where Kaggle · 8 x TPU v5e" in words(text)
    assert f"  terminal   {plan.command}" in text.splitlines(), "a command stays in one line"
    assert f"  notebook   {plan.notebook_command}" in text.splitlines()
    for part in (
        "why torch_xla is missing.",
        "restart The kernel must restart afterwards. torch is imported already.",
        "broken torchvision 0.1 was built for another torch. Install its partner.",
        "note jax is here. Use one.",
        "gpukit tpu --apply",
    ):
        assert part in words(text)
    others = [line for line in text.splitlines() if "package-number" not in line]
    assert all(len(line) <= 110 for line in others)


def test_a_plan_that_installs_nothing_shows_no_command():
    text = plan_text(Plan(NOTHING, "There is no TPU here."))
    assert "pip" not in text
    assert "no TPU found" in text
    assert "--apply" not in text
    assert "Use another device." in plan_text(Plan(IMPOSSIBLE, "It cannot be.", "Use another device."))


def test_an_installation_shows_the_state_and_the_way_back_where_it_went_wrong():
    changes = (Change("torch", "2.10.0+cpu", None), Change("libtpu", None, "0.0.21"))
    commands = ("python -m pip install torch", "python -m pip uninstall -y libtpu")
    done = Installation("failed", "The disk is full.", "Make room.", changes, commands)
    text = installation_text(done)
    assert text == str(done)
    assert "the installation failed" in text
    assert "why The disk is full. Make room." in words(text)
    assert "torch 2.10.0+cpu is gone, libtpu 0.0.21 is new" in words(text)
    assert [line for line in text.splitlines() if "go back" in line] == [f"  go back    {c}" for c in commands]
    assert "--index-url" in text


def test_an_installation_that_went_well_shows_on_what_the_step_ran():
    verification = Verification(True, "xla:0", "XLA on CPU", "PJRT_DEVICE=CPU asked for that.")
    done = Installation("installed", verification=verification, restart=True, restart_reason="torch runs.")
    text = installation_text(done)
    assert "ran on xla:0, XLA on CPU. PJRT_DEVICE=CPU asked for that." in words(text)
    assert "TPU." not in text
    assert "The kernel must restart. torch runs." in text
    assert "go back" not in text
