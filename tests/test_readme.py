"""What README and map say is so: every module is named, commands are CI's, the example works."""

import pathlib
import re
import runpy

import notebooks
import pytest
import test_documented_commands

from convt5 import train

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
TEST_COMMAND = "uv run --extra dev pytest"


def code_block(first_line: str) -> str:
    page = (ROOT / "docs" / "guides" / "tasks.md").read_text()
    return next(
        body
        for body in re.findall(r"```\w*\n(.*?)```", page, flags=re.DOTALL)
        if body.startswith(first_line)
    )


def test_ci_runs_the_test_command_of_the_readme():
    assert f"pip install uv && {TEST_COMMAND}\n" in README
    assert TEST_COMMAND in (ROOT / ".ci" / "run").read_text().splitlines()


def test_what_is_promised_about_data_names_tests_that_exist():
    page = (ROOT / "docs" / "data.md").read_text()
    files = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    defined = set(re.findall(r"^ *(?:def|class) (\w+)", "\n".join(files.values()), re.M))
    table = [row for row in page.partition("\n\n## ")[0].splitlines() if row.startswith("|")]
    promises = table[2:]
    for row in promises:
        named = re.findall(r"`(test_\w+(?:\.py)?|Test\w+)`", row.split("|")[2])
        assert named, row
        assert set(named) <= defined | set(files), row


def test_the_map_names_every_module_and_nothing_else():
    written = runpy.run_path(str(ROOT / "docs" / "tools" / "code_map.py"))["page"]()
    assert (ROOT / "docs" / "code.md").read_text() == written, "run docs/tools/code_map.py"


def test_the_map_for_contributors_names_every_folder():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`([\w/]+)/`", page.partition("## Map of the code")[2]))
    packages = {str(init.parent.relative_to(ROOT)) for init in ROOT.glob("convt5/*/__init__.py")}
    folders = {"gin", "launch", "tasks", "tests", "docs"}
    assert named == packages | folders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_commands_and_links_exist(page):
    text = page.read_text()
    for name in re.findall(r"--gin_file=(gin/[\w/]+\.gin)", text):
        assert (ROOT / name).is_file(), name
    for module in re.findall(r"python -m (convt5\.\w[\w.]*\w)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), module
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_sections_lead_to_one(page):
    def anchors(text: str) -> set[str]:
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        return {
            re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles
        }

    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if "://" not in target:
            other = page.parent / target if target else page
            assert anchor in anchors(other.read_text()), f"{target}#{anchor}"


def test_pages_link_one_another_in_the_site_as_in_the_repository():
    rewritten = runpy.run_path(str(ROOT / "docs" / "tools" / "site_pages.py"))["rewritten"]
    text = "[a](../data.md) [b](../../README.md#models) [c](https://a.b/c.md) [d](../../.ci/run)"
    found = rewritten(text, here="docs/guides/tasks.md", page="guides/tasks.md")
    assert found == "[a](../data.md) [b](../index.md#models) [c](https://a.b/c.md) [d]"
    found = rewritten("[a](docs/data.md#order)", here="README.md", page="index.md")
    assert found == "[a](data.md#order)"


def test_every_page_is_in_the_menu_of_the_site():
    menu = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    pages.discard("comparison/comparison.md")  # A table that comparison.md shows.
    pages |= {str(page.relative_to(ROOT / "docs").with_suffix(".md")) for page in NOTEBOOKS}
    assert menu == pages | {"index.md", "contributing.md", "changelog.md"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_becomes_a_page_with_its_outputs(path):
    notebook = notebooks.read(path)
    page = notebooks.markdown(notebook)
    assert page.startswith("# ")
    for cell in notebook["cells"]:
        assert "".join(cell["source"]) in page
    assert "data:image/png;base64," in page
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page):
        assert target.startswith("data:") or (path.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
def test_the_notebook_of_the_quick_start_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    small = [*test_documented_commands.SMALL_TEXT, test_documented_commands.SMALL_BATCHES]
    main = train.main
    monkeypatch.setattr(train, "main", lambda argv: main([*argv, *small]))
    (notebook,) = (notebooks.read(path) for path in NOTEBOOKS)
    found = notebooks.execute(notebook, RUN_DIR=str(tmp_path / "run"), STEPS=40)
    assert found["records"][-1]["step"] == 40
    assert found["prediction"].texts[0]
    assert [
        output["output_type"] for cell in notebook["cells"] for output in cell.get("outputs", ())
    ] == ["display_data", "stream"]


def test_the_purpose_of_every_slow_or_nightly_test_is_stated():
    page = (ROOT / "tests" / "README.md").read_text()
    page = page.partition("## What the slow and nightly tests find")[2]
    slow = re.compile(r"mark\.(slow|nightly)|[ (=]quick\(")
    files = [path for path in (ROOT / "tests").glob("test_*.py") if slow.search(path.read_text())]
    named = set(re.findall(r"`(test_\w+\.py)`", page))
    assert named == {path.name for path in files}


def test_the_readme_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 150


def test_a_task_of_ten_lines_is_registered_and_read(tmp_path, monkeypatch, request):
    import seqio

    from convt5 import data

    monkeypatch.chdir(tmp_path)
    for name in ("reviews.tsv", "reviews_dev.tsv"):
        (tmp_path / name).write_text("a fine film\tpositive\na dull film\tnegative\n" * 8)
    code = code_block("# my_tasks.py")
    assert len([line for line in code.splitlines() if line]) <= 14
    exec(compile(code, "my_tasks.py", "exec"), {})
    request.addfinalizer(lambda: seqio.TaskRegistry.remove("reviews"))
    config = data.DataConfig(
        mixture="reviews", batch_size=2, encoder_length=16, decoder_length=16, shuffle=False
    )
    batches = config.build(process_index=0, process_count=1)
    batch = next(batches)
    texts = [batches.vocabulary.decode(row.tolist()) for row in batch["decoder_target_tokens"]]
    assert texts == ["positive", "negative"]
