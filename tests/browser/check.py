"""Pages of runs and measurements in a real browser: no console errors, readable on a phone and on a desk.

python tests/browser/check.py [FOLDER]: pages and pictures go to FOLDER (default .cache/browser). Chromium is
installed with apt when it is missing. Each page is measured inside of a frame as wide as the screen that is
meant, because a browser without a screen does not make its window narrower than 500 px.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

from bringup import ROOT, bench, benching, benchreport, runs, webpage
from bringup.events import Change, Failure, HostOutcome, RoleOutcome

WIDTHS = (390, 1280)
"""A phone and a desk, CSS pixels."""
HEIGHT = 2400
BROWSER_LIMIT_S = 90
INSTALL_LIMIT_S = 600
VIRTUAL_MS = 3000
SMALLEST_TEXT = 9.0
"""CSS pixels of a letter's box below which a chart cannot be read."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MACOS = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")

MEASURE = """
const frame = document.querySelector("iframe"), errors = [];
window.addEventListener("load", () => setTimeout(() => {
  const page = frame.contentDocument, root = page.documentElement;
  const inside = (text) => {
    const own = text.getBoundingClientRect(), around = text.closest("svg").getBoundingClientRect();
    return own.left >= around.left - 1 && own.right <= around.right + 1
      && own.top >= around.top - 1 && own.bottom <= around.bottom + 1;
  };
  const texts = [...page.querySelectorAll("svg text")];
  const scrolled = (one) => one.closest(".wide") !== null;
  const wide = [...page.querySelectorAll("body *")].filter(
    (one) => !scrolled(one) && one.getBoundingClientRect().right > root.clientWidth + 1);
  const overlapping = [];
  for (const svg of page.querySelectorAll("svg")) {
    const boxes = [...svg.querySelectorAll("text")].map((one) => [one, one.getBoundingClientRect()]);
    boxes.forEach(([one, a], at) => boxes.slice(at + 1).forEach(([other, b]) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2) {
        overlapping.push(one.textContent + " / " + other.textContent);
      }
    }));
  }
  const lines = (cell) => {
    const range = page.createRange();
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map((box) => Math.round(box.top / 4))).size;
  };
  const broken = [...page.querySelectorAll("th, td.n")].filter(
    (cell) => !/[\\s-]/.test(cell.textContent.trim()) && lines(cell) > 1);
  document.getElementById("measured").textContent = JSON.stringify({
    width: root.clientWidth, scroll: root.scrollWidth, height: root.scrollHeight,
    title: page.title, headings: page.querySelectorAll("h1").length, charts: page.querySelectorAll("svg").length,
    words: page.body.innerText.length,
    wide: wide.slice(0, 5).map((one) => one.tagName + " " + one.textContent.slice(0, 40)),
    outside: texts.filter((one) => !inside(one)).map((one) => one.textContent),
    overlapping: overlapping.slice(0, 5), broken: broken.slice(0, 5).map((cell) => cell.textContent),
    smallest: Math.min(99, ...texts.map((one) =>
      parseFloat(frame.contentWindow.getComputedStyle(one).fontSize)
        * one.closest("svg").getBoundingClientRect().width / one.closest("svg").viewBox.baseVal.width)),
  });
}, 300));
"""


@dataclass(frozen=True)
class Page:
    """A page's name, its text, and how many charts it must show."""

    name: str
    text: str
    charts: int = 0


# --- pages -------------------------------------------------------------------------------------------------

NASTY = '<b>not bold</b> "100% $HOME" ünïcödé ' + "a-very-long-word-without-a-break" * 6


def pages() -> list[Page]:
    """A measurement with all its charts, a climb, and a run with changes, failures and odd names."""
    result = measured()
    summaries = result.targets[0].summaries
    compared = benching.against(summaries, {key: halved(value) for key, value in summaries.items()})
    ladder = [("as it is", 21.0), ("--speculative-num-steps=1", 34.5), ("--speculative-num-steps=3", 52.1)]
    return [
        Page("bench", benchreport.page(result, against=compared), charts=3),
        Page("tune", benchreport.page(result, ladder=ladder), charts=4),
        Page("run", webpage.render(record())),
    ]


def halved(summary: bench.Summary) -> bench.Summary:
    return dataclasses.replace(
        summary,
        median=summary.median / 2,
        p10=(summary.p10 or 0) / 2,
        minimum=(summary.minimum or 0) / 2,
        values=tuple(value / 2 for value in summary.values),
    )


def measured() -> benching.BenchResult:
    """A result with numbers as an eight-GPU node has them."""
    items = []
    for concurrent in (1, 4, 8, 16, 32):
        load = bench.Load(2048, 512, concurrent)
        answered = [
            tuple(
                bench.Request(0.0, 0.4 + 0.01 * number, 8 + concurrent / 8 + 0.1 * number, 2048, 512)
                for number in range(concurrent)
            )
            for _ in range(5)
        ]
        series = [
            bench.Run(9 + concurrent / 8, requests, accept_length=3.2, accept_percent=73.0)
            for requests in answered
        ]
        items.append(benching.measured_of(bench.Series(load, tuple(series))))
    beside = {
        "log": {"readings": 812, "decode_tok_s": 61.5, "accept_length": 3.21, "graph_percent": 100.0},
        "gpus": [{"index": index, "used_gib_most": 131.2, "free_gib": 9.7} for index in range(8)],
        "locality": {"processes": 9, "bytes_by_node": {"0": 2**40}, "planned_nodes": "0-1"},
        "tunnel_ms": 0.41,
        "notes": [f"runs otherwise than planned: {NASTY}"],
    }
    prints = {"driver": "580.105.08", "GPUs": "8 x NVIDIA H20", "packages": NASTY}
    target = benching.TargetResult(
        f"h20-01 {NASTY[:40]}", "http://127.0.0.1:1", "glm", "sglang", "0.5.15", tuple(items), prints, beside
    )
    return benching.BenchResult("S1", "2026-11-30T00:00:00+00:00", 1234.5, (target,))


def record() -> runs.RunRecord:
    """A run in which everything happened."""
    role = RoleOutcome(ok=12, changed=3, failed=1, begin_s=0.5, end_s=13.0)
    diff = f"--- before\n+++ after\n@@ -1 +1 @@\n-{NASTY}\n+{NASTY[::-1]}\n"
    hosts = {
        name: HostOutcome(ok=40, changed=3, failed=failed, roles={"engine_service": role, "preflight": role})
        for name, failed in (("h20-01", 1), ("a-host-with-quite-a-long-name.example.org", 0))
    }
    return runs.RunRecord(
        id="20261130T000000Z-provision-h20",
        name="provision",
        inventory="h20",
        status="failed",
        exit_code=4,
        begun="2026-11-30T00:00:00.000+00:00",
        seconds=66.0,
        arguments={"limit": NASTY},
        hosts=hosts,
        changes=tuple(Change("h20-01", "engine_service", NASTY, diff) for _ in range(3)),
        failures=(Failure("h20-01", "engine_service", NASTY, NASTY, "failed"),),
        causes=(
            {
                **dict.fromkeys(("cause", "title", "meaning", "check", "remedy", "runbook"), NASTY),
                "hosts": ["a"],
            },
        ),
        notes=(NASTY,),
    )


# --- the browser -------------------------------------------------------------------------------------------


def browser() -> str:
    """The program; installed first where apt can. Raises RuntimeError where there is none to be had."""
    if found := _installed():
        return found
    if shutil.which("apt-get"):
        sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
            subprocess.run(
                [*sudo, "apt-get", *words],
                env=environment,
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=INSTALL_LIMIT_S,
            )
    if found := _installed():
        return found
    raise RuntimeError("no Chromium: install it (chromium, or Google Chrome), then again")


def _installed() -> str | None:
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return found or (str(MACOS) if MACOS.is_file() else None)


def browse(program: str, page: Path, *words: str) -> tuple[str, list[str]]:
    """What the browser prints for a page, and the lines of its console."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--enable-logging=stderr",
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={VIRTUAL_MS}",
                *words,
                page.as_uri(),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BROWSER_LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the browser ended with {done.returncode}: {done.stderr[-400:]}")
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def wrapper(page: Page, width: int) -> str:
    """A page that shows another in a frame of a width, and measures it."""
    return (
        f'<!doctype html><html><head><link rel="icon" href="data:,"><style>body {{ margin: 0 }} iframe {{ border: 0 }}'
        f'</style></head><body><iframe width="{width}" height="{HEIGHT}" srcdoc="{escape(page.text)}"></iframe>'
        f'<pre id="measured"></pre><script>{MEASURE}</script></body></html>'
    )


def look(program: str, page: Page, width: int, folder: Path) -> list[str]:
    """Everything wrong with a page at a width; its picture lies in the folder."""
    path = folder / f"{page.name}-{width}.html"
    path.write_text(wrapper(page, width), encoding="utf-8")
    dom, console = browse(program, path, f"--window-size={max(width, 500)},{HEIGHT}", "--dump-dom")
    picture = path.with_suffix(".png")
    picture.unlink(missing_ok=True)
    browse(program, path, f"--window-size={max(width, 500)},{HEIGHT}", f"--screenshot={picture}")
    found = re.search(r'<pre id="measured">(.*?)</pre>', dom, re.DOTALL)
    if found is None or not found[1]:
        return ["was not measured", *console]
    seen = json.loads(unescape(found[1]))
    wrong = [*problems(page, width, seen), *(f"console: {line}" for line in console)]
    return wrong if picture.is_file() else [*wrong, "gave no picture"]


CHECKS: Mapping[str, Callable[[Page, int, Mapping[str, Any]], bool]] = {
    "is not laid out at its width": lambda page, width, seen: bool(seen["width"] == width),
    "is wider than its screen": lambda page, width, seen: not seen["wide"] and seen["scroll"] <= width,
    "has charts missing": lambda page, width, seen: bool(seen["charts"] == page.charts),
    "has no title, heading or text": lambda page, width, seen: bool(
        seen["title"] and seen["headings"] == 1 and seen["words"] > 200
    ),
    "has letters outside of a chart": lambda page, width, seen: not seen["outside"],
    "has letters on letters": lambda page, width, seen: not seen["overlapping"],
    "breaks words in a table": lambda page, width, seen: not seen["broken"],
    "has letters too small to read": lambda page, width, seen: bool(seen["smallest"] >= SMALLEST_TEXT),
}


def problems(page: Page, width: int, seen: Mapping[str, Any]) -> Iterator[str]:
    """What a measured page does not keep."""
    for what, holds in CHECKS.items():
        if not holds(page, width, seen):
            yield f"{what}: {json.dumps({key: value for key, value in seen.items() if value})}"


BROKEN = (
    Page("broken-wide", "<title>t</title><h1>h</h1><div style='width: 700px'>" + "words " * 99 + "</div>"),
    Page("broken-script", "<title>t</title><h1>h</h1>" + "words " * 99 + "<script>undefined_name()</script>"),
)
"""Pages that must be found wanting, so that a check which sees nothing is no check."""


def main(arguments: list[str]) -> int:
    """0 when every page holds, and both broken ones are found."""
    folder = Path(arguments[0]) if arguments else ROOT / ".cache" / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    program = browser()
    failed = 0
    for page in pages():
        for width in WIDTHS:
            wrong = look(program, page, width, folder)
            failed += bool(wrong)
            print(f"{page.name} at {width} px: {'FAILED' if wrong else 'holds'}", flush=True)
            for line in wrong:
                print(f"  {line}")
    for page in BROKEN:
        if not look(program, page, WIDTHS[0], folder):
            failed += 1
            print(f"{page.name}: FAILED, nothing was found wrong with it")
    print(f"browser: {failed} failed; pictures are in {folder}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
