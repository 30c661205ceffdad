"""A report page needs nothing but itself, shows every run, and runs no text of theirs."""

import html
import json
import math
import re
import shutil

import commands
import pytest

from convt5.reports import page
from convt5.reports.tables import Table

OWN = "document.title='owned'"
EVIL = f'</script><script>{OWN}</script><img src=x onerror="{OWN}">'


def run(name: str, values=(4.0, 3.0, 2.0), *, samples=None) -> page.Run:
    steps = range(10, 10 * len(values) + 1, 10)
    curve = page.Curve(steps, [float(step) for step in steps], values)
    return page.Run(name, {"validation/loss": curve, "loss": curve}, samples or {})


def made(path, runs, tables=(), **fields) -> str:
    known = {"title": "runs", "metric": "validation/loss", "axes": {}, "falling": []}
    page.write(path, page.Page(runs=runs, tables=tables, **known | fields))
    return path.read_text()


def data_of(text: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_a_page_asks_for_nothing_from_elsewhere(tmp_path):
    text = made(tmp_path / "a.html", [run("a")])
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"\b(src|href|import|fetch|url)\s*[=(]\s*[\"']?\w+[:/.]", text)
    assert "default-src 'none'" in text


def test_text_of_runs_never_ends_the_data(tmp_path):
    table = Table(EVIL, [EVIL], [[EVIL]], [EVIL])
    text = made(
        tmp_path / "a.html",
        [run(EVIL, samples={3: EVIL})],
        [table],
        title=EVIL,
        axes={"loss": EVIL},
        warnings=[EVIL],
    )
    assert text.count("<script") == 2
    assert EVIL not in text
    found = data_of(text)
    assert found["runs"][0]["name"] == EVIL
    assert found["tables"][0]["rows"] == [[EVIL]]
    assert html.escape(EVIL) in text


def test_what_is_not_finite_is_no_number_of_a_page(tmp_path):
    text = made(tmp_path / "a.html", [run("a", (math.nan, math.inf, 1.0))])
    points = data_of(text)["runs"][0]["curves"]["loss"]
    assert points == [[10, 10.0, None], [20, 20.0, None], [30, 30.0, 1.0]]


@pytest.mark.parametrize("count", [1, 100])
def test_many_long_runs_make_a_page_of_few_megabytes(tmp_path, count):
    values = [1.0 / (1 + i) for i in range(3000)]
    text = made(tmp_path / "a.html", [run(f"run {i}", values) for i in range(count)])
    assert len(text) < 8e6
    points = data_of(text)["runs"][-1]["curves"]["loss"]
    assert points[-1][0] == 30_000
    assert 300 <= len(points) <= 500


def test_settings_that_differ_are_named_and_no_others():
    same = {"a": "1", "b": "2"}
    assert page.differing({"x": same, "y": same}).columns == ()
    table = page.differing({"x": same | {"b": "3"}, "y": same | {"c": "4"}})
    assert table.columns == ["run", "b", "c"]
    assert table.rows == [["x", "3", ""], ["y", "2", "4"]]


SESSION = """
const seen = {curves: () => document.querySelectorAll(".curve").length};
const told = {title: document.title, before: seen.curves()};
const svg = document.querySelector(".chart svg"), box = svg.getBoundingClientRect();
const at = (type, x, y) => svg.dispatchEvent(new PointerEvent(type, {
  clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true}));
at("pointermove", 0.95, 0.5);
const rows = [...document.querySelectorAll(".tip div")];
told.tip = rows.map((row) => [...row.children].map((cell) => cell.textContent));
const path = () => document.querySelector(".curve").getAttribute("d");
document.querySelectorAll("button")[0].click();  // Draws at the width that the page has now.
const whole = path();
at("pointerdown", 0.3, 0.3); at("pointermove", 0.6, 0.3); at("pointerup", 0.6, 0.3);
told.zoomed = path() !== whole;
document.querySelectorAll("button")[0].click();
told.restored = path() === whole;
document.querySelector(".runs input").click();
told.after = seen.curves();
const cells = () => [...document.querySelectorAll("td:first-child")].map((c) => c.textContent);
const head = document.querySelector("th");
head.click(); told.up = cells(); head.click(); told.down = cells();
told.sample = document.querySelector("pre").textContent;
told.title = document.title;
document.body.replaceChildren(JSON.stringify(told));
"""


def test_amounts_are_sorted_by_size_whatever_their_prefix(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node here to run the sorting in")
    text = made(tmp_path / "a.html", [run("a")])
    function = re.search(r"function key\(.*?\n}\n", text, re.DOTALL)
    ascending = ["-2", "0", "9 B", "1.5k", "2 kB", "4.56M", "312 MB", "1.2 GB", "900 TFLOP", "1P"]
    ascending += ["3.45 PFLOP", "2.1E", "5e+20"]
    script = f"{function[0]} console.log(JSON.stringify({ascending}.map(key)))"
    numbers = json.loads(commands.run([node, "-e", script], timeout=60, check=True).stdout)
    assert numbers == sorted(numbers)
    assert numbers[-3:] == [3.45e15, 2.1e18, 5e20]


def test_a_browser_draws_zooms_switches_and_sorts(tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here to open a page in")
    path = tmp_path / "page.html"
    table = Table("sorted", ["n"], [["9"], ["1,000"], [""], ["12.3k"], ["2m 00s"], ["-"]])
    runs = [run(EVIL, samples={3: EVIL}), run("second", (3.0, 2.5, 2.25))]
    text = made(path, runs, [table], title="a < b")
    # Another script than that of the page may run in this test alone.
    path.write_text(
        re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", text).replace(
            "</body>", f"<script>setTimeout(() => {{{SESSION}}}, 500)</script></body>"
        )
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    flags.append(f"--user-data-dir={tmp_path / 'profile'}")
    command = [chromium, *flags, "--dump-dom", path.as_uri()]
    done = commands.run(command, timeout=120, check=True)
    shown = done.stdout
    told = json.loads(html.unescape(re.search(r"<body>(.*?)</body>", shown, re.DOTALL)[1]))
    assert told["title"] == "a < b"
    assert (told["before"], told["after"]) == (2, 1)
    assert ["second", "2.25"] in told["tip"]
    assert told["zoomed"]
    assert told["restored"]
    assert told["up"] == ["9", "2m 00s", "1,000", "12.3k", "-", ""]
    assert told["down"] == ["-", "12.3k", "1,000", "2m 00s", "9", ""]
    assert told["sample"] == EVIL
