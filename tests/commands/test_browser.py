"""Pages that commands write, as a browser shows them, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.commands.test_report_run import monitored
from torchbudget.commands.command_line import main

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
# After all is loaded: how wide the pictures are, and what was fetched from anywhere else.
ASK = """<script>
addEventListener("load", () => {
  const widths = [...document.images].map((one) => one.naturalWidth);
  const fetched = performance.getEntriesByType("resource").map((one) => one.name);
  const others = fetched.filter((name) => !name.startsWith("data:"));
  document.title = JSON.stringify([widths, others, document.body.innerText.length]);
});
</script>"""


def seen(page: Path) -> tuple[list[int], list[str], int]:
    """What a browser says of a page: widths of pictures, what it fetched, letters to read."""
    asked = page.with_name("asked.html")
    asked.write_text(page.read_text("utf-8").replace("</head>", f"{ASK}</head>"), "utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={page.with_name('profile')}"
    done = subprocess.run(
        [str(BROWSER), *options, profile, "--virtual-time-budget=10000", asked.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = re.search(r"<title>\[\[([\d,]*)\],\[(.*?)\],(\d+)\]</title>", done.stdout)
    assert found, done.stdout[:500] + done.stderr[-500:]
    widths = [int(width) for width in found[1].split(",") if width]
    return widths, [name for name in found[2].split(",") if name], int(found[3])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: {', '.join(NAMES)}")
@pytest.mark.parametrize(("command", "pictures"), [("plan", 3), ("report", 1)])
def test_a_browser_shows_the_page(
    command: str, pictures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pictures, and text; nothing is fetched."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    if command == "plan":
        np.save("sizes.npy", np.random.default_rng(0).integers(10, 400, 2000))
        asked = ["plan", "sizes.npy", "--budget", "4000", "--cost", "unit=1,fixed=100"]
    else:
        monitored()
        asked = ["report", "run.jsonl"]
    assert main([*asked, "--html", "page.html"]) == 0
    widths, fetched, letters = seen(tmp_path / "page.html")
    assert len(widths) >= pictures
    assert min(widths) > 100
    assert fetched == []
    assert letters > 300
