"""The page: whole in one file, escaped, and as wide as the screen in a real browser, light and dark."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fpquant.checkpoint import ModuleSpec
from fpquant.evaluation.compare import Row
from fpquant.evaluation.compared import Compared
from fpquant.evaluation.plan import Plan
from fpquant.evaluation.records import Answers, Result
from fpquant.evaluation.statistics import mean_interval
from fpquant.report.comparison import write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "<script>alert(1)</script>&$x$"


def row(name, bits, loss, settings=None, axes=(), ratio=None):
    draw = np.random.default_rng(0)
    losses = (3 + draw.normal(0, 0.1, 12) + loss + np.random.default_rng(len(name)).normal(0, 0.002, 12)).tolist()
    low, high = mean_interval(losses)
    protocol = {
        "dataset": f"{EVIL}.txt",
        "window": 2048,
        "windows": 12,
        "stride": 2048,
        "join": "blank line",
        "bos": "none added",
        "dtype": "float32",
        "data_fingerprint": "f",
        "interval": "95%",
    }
    value = float(np.exp(np.mean(losses)))
    results = [Result("perplexity", "perplexity", value, (np.exp(low), np.exp(high)), protocol, windows=losses)]
    if settings is not None:
        kept = protocol | {"chosen": [0, 5, 11], "unit": "nats"}
        figures = (("kl_original_to_quantized", loss), ("kl_quantized_to_original", loss), ("top1_agreement", 1 - loss))
        results += [Result("distance", m, v, (v, v), kept, windows=[v, v, v]) for m, v in figures]
    right = [int(x) for x in draw.random(100) < 0.3]
    asked = {"dataset": "local", "definition": "mmlu of lm-eval", "data_fingerprint": "q", "chance": 0.25}
    results.append(Result("mmlu", "acc", sum(right) / 100, (0.2, 0.4), asked, {"law": Answers(right, right)}))
    modules = {
        f"model.layers.{i}.{m}": ModuleSpec((64, 64), 9 * i) for i in range(8) for m in ("attn.q_proj", "mlp.up_proj")
    }
    return Row(name, settings, axes, bits, ratio, modules if ratio else {}, results, {"total": 1.0})


@pytest.fixture
def compared(tmp_path):
    plan = Plan(policies=("fisher", "random"), ratios=(0.7, 0.9), datasets=(f"{EVIL}.txt",), tasks=("mmlu",))
    rows = [row("original", 16.0, 0)]
    for name, bits, loss in (("nvfp4", 4.5, 0.25), ("nvfp4, clip fisher", 4.5, 0.1), ("fp8", 8.0, 0.01)):
        rows.append(row(name, bits, loss, {"pair": name.split(",")[0], "clip": "none", "seed": 0}))
    for policy, extra in (("fisher", 0), ("random", 0.05)):
        for ratio, bits, loss in ((0.7, 5.61, 0.03), (0.9, 4.91, 0.06)):
            settings = {"pair": "nvfp4/fp8", "clip": "none", "seed": 0, "ratio": ratio, "policy": policy}
            rows.append(row(f"{policy} {ratio:.0%}", bits, loss + extra, settings, (ratio, None, None), ratio))
    found = Compared.of(f"a {EVIL} model", plan, rows, {"torch": EVIL}, tmp_path / "C")
    found = replace(found, warnings=[*found.warnings, EVIL])
    write(found)
    return found


class Page(HTMLParser):
    """Which tags there are, what they refer to, and whether they close."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]
        if tag not in ("meta", "link", "br", "hr", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.remove(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_it_needs_nothing_beside_it_and_runs_nothing(compared):
    text = (compared.out / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert "@import" not in text and "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert page.tags.count("svg") == 2 + 4


def test_text_is_escaped(compared):
    text = (compared.out / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;$x$") > 5


def test_names_within_pictures_are_each_pictures_own(compared):
    text = (compared.out / "report.html").read_text()
    names = re.findall(r' id="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert {*re.findall(r'href="#([^"]+)"', text), *re.findall(r"url\(#([^)]+)\)", text)} <= set(names)


def test_the_verdict_is_there_by_what_it_compares_with(compared):
    text = (compared.out / "report.html").read_text()
    for heading in ("Against the policy fisher", "Against uniform weights", "Against the original"):
        assert heading in text
    assert "random 70% is worse than fisher 70%" in text
    assert 'class="mark worse"' in text and 'class="mark better"' in text


SHOT = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
QUIET = ("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=2000")
PROBE = """<iframe id="f" src="report.html" style="width:{width}px;height:9000px;border:0"></iframe><script>
onload = () => {{ const d = document.getElementById("f").contentDocument, e = d.documentElement;
  const s = d.defaultView.getComputedStyle(d.body);
  document.title = [e.scrollWidth, e.scrollHeight, s.backgroundColor, d.querySelectorAll("svg text").length].join("|");
  document.body.textContent = document.title; }}</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_the_screen(compared, width, dark, tmp_path):
    """The page is looked at through a frame as wide as the screen, whose measures a script reads."""
    probe = Path(compared.out) / "probe.html"
    probe.write_text(PROBE.format(width=width))
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    done = subprocess.run(
        [
            *(CHROMIUM, *SHOT, *QUIET, *scheme, "--allow-file-access-from-files"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--dump-dom", probe.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<title>(\d+)\|(\d+)\|(rgb[^|]*)\|(\d+)</title>", done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    assert int(found[1]) <= width, "it scrolls sideways"
    assert int(found[2]) > 1000 and int(found[4]) > 50
    red = int(re.search(r"\d+", found[3])[0])
    assert red < 40 if dark else red > 230
