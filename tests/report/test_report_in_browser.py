"""The page in a real browser: no error, every picture, tables that sort, a phone's width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_experiment

from fedhet.study import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(
        BROWSER is None, reason=f"there is no browser: none of {', '.join(BROWSERS)}"
    ),
]
# Before all else in the page.
LISTEN = """<script>
window.problems = [];
addEventListener("error", e => problems.push(e.message || `cannot load ${e.target.tagName}`), true);
addEventListener("securitypolicyviolation", e => problems.push(e.violatedDirective));
for (const kind of ["error", "warn"]) console[kind] = text => problems.push(String(text));
</script>"""
# After all else: it opens every part, sorts every table by every column, and notes what it finds.
PROBE = """<script>
addEventListener("load", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
  const unsorted = [];
  let sorted = 0;
  for (const table of document.querySelectorAll("table")) {
    for (const head of table.tHead.rows[0].cells) {
      for (const [way, sign] of [["ascending", 1], ["descending", -1]]) {
        head.firstElementChild.click();
        const cells = [...table.tBodies[0].rows].map(row => row.cells[head.cellIndex]);
        const numbers = cells.filter(c => c.dataset.value !== undefined);
        const values = numbers.map(c => sign * Number(c.dataset.value));
        const right = values.every((v, i) => i === 0 || values[i - 1] <= v);
        sorted += numbers.length > 1;
        if (!right || head.getAttribute("aria-sort") !== way) unsorted.push(table.id);
      }
    }
  }
  const page = document.documentElement;
  const found = {
    problems, unsorted, sorted,
    pictures: document.images.length,
    missing: [...document.images].filter(i => !i.complete || !i.naturalWidth).length,
    width: innerWidth, content: page.scrollWidth,
  };
  parent.postMessage("probe" + JSON.stringify(found), "*");
});
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("report")
    axes = {
        "method": ["A", "<b>B</b>", "C with a long name that does not end before the edge", "D"],
        "partition.alpha": [0.05, 0.3, 1.0],
        "seed": [0, 1, 2],
    }
    made = make_experiment(
        home / "made", axes, lambda a: 0.5 + a["partition.alpha"] / 9 + 0.01 * len(a["method"])
    )
    text = report.write(made).page.read_text()
    probed = text.replace("<head>", f"<head>{LISTEN}").replace("</body>", f"{PROBE}</body>")
    assert probed.count("window.problems") == 1 and "probe" in probed
    path = home / "probed.html"
    path.write_text(probed)
    return path


def open_page(page: Path, width: int) -> dict[str, Any]:
    """What the probe has found in a window of this width."""
    # A window is at least 500 pixels wide, but a frame in it can have any width.
    frame = page.with_name(f"frame-{width}.html")
    style = f"border:0;width:{width}px;height:900px"
    frame.write_text(
        '<script>addEventListener("message", e => document.body.dataset.found = e.data)</script>'
        f'<iframe src="{page.name}" style="{style}"></iframe>'
    )
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    options += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=8000"]
    command = [str(BROWSER), *options, "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-found="probe(.*?)"', done.stdout)
    assert found, f"the page has not answered: {done.stdout[-500:]} {done.stderr[-500:]}"
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    return answer


@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_works(page: Path, width: int) -> None:
    found = open_page(page, width)
    assert found["problems"] == [] and found["unsorted"] == []
    assert found["pictures"] >= 7 and found["missing"] == 0
    assert found["sorted"] > 20
    assert found["width"] == width
    assert found["content"] <= width
