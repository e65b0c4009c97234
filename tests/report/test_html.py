"""The page: complete without a script, safe against every name, and legible in a real browser."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_memprec._units import GIB, format_bytes
from lightning_memprec.report import format_html, judge
from lightning_memprec.report.content import part_rows, peak_sentence

from .estimates import HOSTILE, REMEDIES, hostile_estimate, small_estimate

VOID = ("meta", "br", "img", "input", "link", "hr")


class Page(HTMLParser):
    """Reads a page and checks that every element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        where = self.open[-1] if self.open else ""
        self.texts.setdefault(where, []).append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def estimate():
    return small_estimate()


@pytest.fixture(scope="module")
def text(estimate):
    verdict = judge(estimate.minimum_device_bytes, GIB // 8, safety_margin=0.05)
    return format_html(estimate, verdict, REMEDIES, ["A note."])


def test_the_page_says_what_the_report_says(estimate, text):
    page = Page(text)
    said = " ".join(" ".join(texts) for tag, texts in page.texts.items() if tag not in ("script", "style"))
    for name, size in part_rows(estimate):
        assert name in said
        assert format_bytes(size) in said
    for words in (
        "DOES NOT FIT",
        "a smaller batch",
        "batch_size=1",
        "A note.",
        peak_sentence(estimate),
        "optimizer step",
        "* stands",
    ):
        assert words in said
    headings = page.texts["h2"]
    assert headings == [
        "What fills the memory",
        "What would help",
        "Over time",
        "Phases",
        "Modules at the peak",
        "Beside the device",
        "Assumed",
    ]


def test_layers_are_one_row(text):
    assert "<code>*.*</code>" in text
    assert "Linear</span>" in text
    assert "&times; 4" in text


def test_nothing_is_loaded_from_anywhere(text):
    page = Page(text)
    assert not [e for e in page.elements if {"src", "href", "style", "action"} & set(e[1])]
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in re.sub(r"http-equiv|<title>.*?</title>", "", text)


def test_the_policy_names_the_only_style_and_script(text):
    page = Page(text)
    (policy,) = [m["content"] for m in page.of("meta") if m.get("http-equiv") == "Content-Security-Policy"]

    def allowed(content):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        return f"'sha256-{digest}'" in policy

    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert [allowed(content) for content in (*scripts, *styles)] == [True, True]


def test_every_chart_has_words(text):
    page = Page(text)
    marks = [g for g in page.of("g") if g.get("class", "").startswith("mark")]
    assert len([m for m in marks if m["class"] == "mark peak"]) == 1
    assert all(m["tabindex"] == "0" and m["role"] == "img" and "MiB" in m["aria-label"] for m in marks)
    # Whatever else is drawn is hidden from screen readers, for a table says the same.
    for svg in page.of("svg"):
        assert svg.get("aria-hidden") == "true" or svg.get("id") == "timeline" or "x" in svg
    assert all(th["scope"] in ("col", "row") for th in page.of("th"))
    assert len(page.of("caption")) == len(page.of("table")) == 4
    assert page.of("html") == [{"lang": "en"}]


def test_the_drawn_peak_is_the_peak(estimate, text):
    points = json.loads(re.search(r'<script type="application/json" id="points">(.*?)</script>', text)[1])
    assert len(points) == len(estimate.timeline)
    places = [place for place, _ in points]
    assert places == sorted(places)
    assert 0 <= places[0] < places[-1] < 100
    label = re.search(r'class="mark peak"[^>]*aria-label="([^"]*)"', text)[1]
    assert format_bytes(estimate.breakdown.total_bytes) in label
    assert estimate.peak_phase.name.replace("_", " ") in label


def test_names_stay_text():
    estimate = hostile_estimate()
    verdict = judge(estimate.minimum_device_bytes, GIB, reason=HOSTILE[0])
    page = Page(format_html(estimate, verdict, REMEDIES, HOSTILE))
    assert {tag for tag, _ in page.elements} <= {
        "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "p", "span", "dl", "dt", "dd", "div",
        "main", "section", "figure", "figcaption", "svg", "g", "rect", "line", "path", "circle", "text", "table",
        "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "code", "pre", "ol", "ul", "li", "b", "details",
        "summary", "footer", "script",
    }  # fmt: skip
    assert len(page.of("script")) == 2
    assert not [e for e in page.elements if any(name.startswith("on") for name in e[1])]
    names = "".join(page.texts["code"])
    assert all(name in names for name in HOSTILE[:4])


def test_a_page_without_an_estimate_gives_the_reason():
    page = Page(format_html(None, judge(None, GIB, reason="It could <not> be traced."), (), ["A note."]))
    assert "UNDETERMINED: It could <not> be traced." in "".join(page.texts["p"])
    assert not page.of("figure")


@pytest.mark.parametrize("device", ["cpu", "T4-16GB"])
def test_a_page_without_a_verdict_has_no_capacity(device):
    page = Page(format_html(small_estimate(device)))
    assert "offered" not in "".join(page.texts["dt"])
    assert not [p for p in page.of("p") if "verdict" in p.get("class", "")]


def test_an_empty_estimate_makes_a_page(estimate):
    from dataclasses import replace

    from lightning_memprec.memory.result import Breakdown

    empty = replace(
        estimate, timeline=(), by_module=(), phases=(), assumptions=(), breakdown=Breakdown(), host=None,
        minimum_reserved_bytes=0, outside_allocator_bytes=0,
    )  # fmt: skip
    assert Page(format_html(empty)).texts["h2"] == ["What fills the memory", "Phases"]


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colors_are_legible_on_light_and_dark():
    import lightning_memprec.report

    style = (Path(lightning_memprec.report.__file__).parent / "page.css").read_text()
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(schemes) == 3  # light, dark, print
    for scheme in schemes:
        colors = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for name, color in colors.items():
            # Web Content Accessibility Guidelines 2.2: 4.5 for text (1.4.3), 3 for graphics (1.4.11).
            if name in ("ink", "soft", "link", "fits", "tight", "overflow", "undetermined"):
                assert contrast(color, colors["card"]) >= 4.5, name
            elif name not in ("page", "card", "line", "halo"):
                assert contrast(color, colors["card"]) >= 3, name


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


def browse(tmp_path, text, *options):
    """Open a page from disk, without a network, and return what the browser made of it."""
    path = tmp_path / "page.html"
    path.write_bytes(text.encode("utf-8", "backslashreplace"))
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000",
            "--enable-logging=stderr", *options, path.as_uri(),
        ],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def complaints(done):
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@in_a_browser
def test_a_browser_runs_the_page_without_complaint(tmp_path, text):
    done = browse(tmp_path, text, "--dump-dom")
    assert complaints(done) == []
    # Set by the script: the policy let it run, and it ran to its end, where one point stays in reach of the Tab key.
    assert '<html lang="en" class="js">' in done.stdout
    assert done.stdout.count('tabindex="0"') == 1
    assert 'tabindex="-1"' in done.stdout


@in_a_browser
def test_names_do_nothing_in_a_browser(tmp_path):
    estimate = hostile_estimate()
    done = browse(
        tmp_path, format_html(estimate, judge(1, GIB, reason=HOSTILE[0]), REMEDIES, HOSTILE), "--dump-dom"
    )
    assert "stolen" not in re.search(r"<title>(.*?)</title>", done.stdout)[1].split("document.title=")[0]
    assert "<title>stolen</title>" not in done.stdout
    assert "<img" not in done.stdout
    assert html.escape(HOSTILE[3], quote=False) in done.stdout


# What a test page asks of the real one: hovering, keys, printing and widths. It is the only script that may run there.
PROBE = """
(() => {
  const out = {};
  const marks = [...document.querySelectorAll('.mark')];
  const readout = document.getElementById('readout');
  const key = (name) => document.activeElement.dispatchEvent(
    new KeyboardEvent('keydown', {key: name, bubbles: true, cancelable: true}));
  out.atRest = readout.textContent;
  marks.find((m) => m.tabIndex === 0).focus();
  key('Home');
  out.first = document.activeElement === marks[0];
  key('ArrowRight');
  out.second = document.activeElement === marks[1];
  out.readout = readout.textContent === marks[1].getAttribute('aria-label');
  key('End');
  out.last = document.activeElement === marks[marks.length - 1];
  out.stops = marks.filter((m) => m.tabIndex === 0).length;
  document.activeElement.blur();
  document.getElementById('timeline').dispatchEvent(new FocusEvent('focusout'));  // The window may have no focus.
  out.restored = readout.textContent === out.atRest;
  const box = document.getElementById('timeline').getBoundingClientRect();
  document.getElementById('timeline').dispatchEvent(
    new PointerEvent('pointermove', {clientX: box.left + box.width * 0.5, clientY: box.top + 50, bubbles: true}));
  out.hovered = readout.textContent;
  window.dispatchEvent(new Event('beforeprint'));
  out.open = document.querySelector('details').open;
  out.wider = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.title = JSON.stringify(out);
})();
"""


def probed(text):
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text = text.replace("script-src '", f"script-src 'sha256-{digest}' '", 1)
    return text.replace("</body>", f"<script>{PROBE}</script></body>")


@in_a_browser
@pytest.mark.parametrize("width", [500, 1400])  # Chromium's window is no narrower than 500.
def test_keys_and_pointer_read_values(tmp_path, text, estimate, width):
    done = browse(tmp_path, probed(text), "--dump-dom", f"--window-size={width},900")
    assert complaints(done) == []
    found = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1]))
    hovered, at_rest = found.pop("hovered"), found.pop("atRest")
    assert found == {
        "first": True, "second": True, "readout": True, "last": True, "stops": 1, "restored": True, "open": True,
        "wider": 0,
    }  # fmt: skip
    assert format_bytes(estimate.breakdown.total_bytes) in at_rest
    assert re.match(r"step \d, [\w ]+, event [\d,]+: [\d.]+ MiB \(parameters", hovered)


@in_a_browser
@pytest.mark.parametrize(
    ("scheme", "card"), [("1", (255, 255, 255)), ("0", (23, 27, 33))], ids=["light", "dark"]
)
def test_the_page_follows_the_color_scheme(tmp_path, text, scheme, card):
    from PIL import Image

    shot = tmp_path / "shot.png"
    browse(
        tmp_path,
        text,
        f"--screenshot={shot}",
        "--window-size=800,900",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    with Image.open(shot) as image:
        counts = image.convert("RGB").getcolors(maxcolors=2**20)
    assert max(counts)[1] == card
    assert len(counts) > 50
