"""The card of a runtime, as text and as HTML."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gpukit.frontend import cards
from gpukit.machine.check import CPU, Check, Chip, Note, PrecisionCheck, Seeds
from gpukit.machine.runtime import Runtime

GIB = 2**30
FOUND = Runtime(
    place="kaggle",
    frontend="kaggle-web",
    in_notebook=True,
    interactive=True,
    python="3.12.11",
    system="Linux x86_64",
    cpu=CPU("Intel(R) Xeon(R) CPU @ 2.00GHz", 4),
    memory_bytes=int(31.4 * GIB),
    shm_bytes=15 * GIB,
    chips=(Chip("cuda", "Tesla T4", 2),),
    driver="580.82.07",
    packages={"torch": "2.10.0+cu128"},
)
T4 = Check(
    "cuda:0",
    "Tesla T4",
    True,
    largest_difference=3.2e-6,
    precisions={
        "fp32": PrecisionCheck(True, True),
        "bf16": PrecisionCheck(False, False, "emulated"),
        "fp16": PrecisionCheck(True, True),
    },
    memory_bytes=15 * GIB,
    free_bytes=int(14.7 * GIB),
)
P100 = Check("cuda:1", "Tesla P100", False, "Tesla P100 (sm_60) cannot run this torch.", "Choose a T4.")
READY = replace(
    FOUND,
    device="cuda:0",
    device_name="Tesla T4",
    precision="fp16",
    precision_reason="with loss scaling (this chip emulates bf16)",
    seed=42,
    seeds=Seeds(42, False, ("python", "torch"), ("cuDNN may choose", "sets")),
    checks=(T4,),
    notes=(Note("Internet is off: nothing can be downloaded.", "Turn it on."),),
    seconds=3.14,
)
CPU_ONLY = replace(READY, device="cpu", device_name=FOUND.cpu.model, precision="fp32", chips=(), notes=())


def lines(runtime):
    """The card's text by its labels."""
    return {line[2:13].strip(): line[13:] for line in cards.text(runtime).splitlines()[1:]}


def test_the_card_says_all_that_was_chosen():
    assert cards.text(READY).splitlines()[0] == "gpukit · ready in 3.1 s"
    found = lines(READY)
    assert found["where"] == "Kaggle, notebook, interactive · Python 3.12.11 · torch 2.10.0+cu128"
    assert found["machine"] == "Intel(R) Xeon(R) CPU @ 2.00GHz, 4 usable cores · 31.4 GiB of memory · Linux x86_64"
    assert found["device"] == "cuda:0 Tesla T4, 14.7 of 15.0 GiB free, driver 580.82.07"
    assert found["checked"].endswith("agree with float64 (largest difference 3e-06)")
    assert found["precision"] == "fp16 with loss scaling (this chip emulates bf16)"
    assert found["seed"] == "42 everywhere; cuDNN may choose"
    assert found["note"] == "Internet is off: nothing can be downloaded. Turn it on."


def test_the_card_of_a_processor_says_whether_anything_else_was_there():
    assert lines(CPU_ONLY)["device"] == "cpu (no GPU or TPU found)"
    assert lines(replace(CPU_ONLY, chips=FOUND.chips))["device"] == "cpu"
    assert lines(replace(CPU_ONLY, precision_reason="no units"))["precision"] == "fp32: no units"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"place": "colab", "frontend": "vscode"}, "Colab, notebook in VS Code, interactive"),
        ({"place": "colab", "frontend": "colab-web"}, "Colab, notebook, interactive"),
        ({"interactive": False}, "Kaggle, notebook, not interactive"),
        ({"place": "local", "frontend": "script", "in_notebook": False}, "this computer, script"),
        ({"place": "local", "frontend": "terminal", "in_notebook": False}, "this computer, terminal"),
    ],
)
def test_the_place_and_the_front_end_are_told_apart(change, where):
    assert lines(replace(FOUND, **change))["where"].startswith(f"{where} · Python")


def test_before_setup_the_card_shows_what_is_there():
    assert "before setup()" in cards.text(FOUND)
    assert lines(FOUND)["chips"] == "2 x Tesla T4 · NVIDIA driver 580.82.07"
    assert lines(replace(FOUND, chips=(), driver=None))["chips"] == "no GPU or TPU found"
    assert "no torch" in lines(replace(FOUND, packages={}))["where"]


def test_info_shows_every_check_with_its_precisions_or_its_reason():
    found = lines(replace(FOUND, checks=(T4, P100)))
    assert found["works"].startswith("cuda:0 Tesla T4, 15.0 GiB · fp32, fp16 · product")
    assert found["fails"] == "cuda:1: Tesla P100 (sm_60) cannot run this torch. Choose a T4."
    assert cards.info_text(FOUND) == cards.text(FOUND)


def test_one_core_is_singular_and_unknown_memory_is_left_out():
    bare = replace(FOUND, cpu=CPU("Arm Neoverse V1", 1), memory_bytes=None)
    assert lines(bare)["machine"] == "Arm Neoverse V1, 1 usable core · Linux x86_64"


def test_long_lines_are_wrapped_under_their_value():
    long = replace(READY, notes=(Note("word " * 60, "The end."),))
    text = cards.text(long).splitlines()
    assert max(map(len, text)) <= 110
    assert text[-1].startswith(" " * 13)
    assert text[-1].endswith("The end.")


class Reader(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.styles = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.styles.append(dict(attributes).get("style", ""))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("runtime", [FOUND, READY, CPU_ONLY, replace(FOUND, checks=(T4, P100))])
def test_the_html_says_what_the_text_says_and_is_well_formed(runtime):
    page = Reader(runtime._repr_html_())
    assert page.open == []
    shown = " ".join(" ".join(page.text).split())
    for label, value in cards.rows(runtime):
        assert label in shown
        assert " ".join(value.split()) in shown


def test_what_others_wrote_is_escaped_in_html():
    page = replace(READY, device_name="<script>x</script>", notes=(Note("a < b & c", ""),))._repr_html_()
    assert "<script" not in page
    assert "a &lt; b &amp; c" in page


def test_the_html_takes_the_notebooks_colours_so_that_it_reads_on_any_theme():
    page = READY._repr_html_()
    assert "background" not in page
    for style in Reader(page).styles:
        # colours of its own are for dots and the bar at the left, never for words
        assert "color:" not in style or re.fullmatch(r"color:#\w{6}", style)
    words = re.sub(r"<span[^>]*>● </span>", "", page)
    assert "color:#" not in words


def test_a_bar_shows_at_a_glance_whether_something_is_off():
    good, off = "solid #2da44e", "solid #d29922"
    assert off in READY._repr_html_()
    assert good in CPU_ONLY._repr_html_()
    assert off in replace(FOUND, checks=(T4, P100))._repr_html_()


def test_a_runtime_shows_itself_as_its_card_everywhere():
    assert str(READY) == repr(READY) == cards.text(READY)

    class Printer:
        text = staticmethod(lambda text: shown.append(text))

    shown = []
    READY._repr_pretty_(Printer, False)
    assert shown == [cards.text(READY)]
