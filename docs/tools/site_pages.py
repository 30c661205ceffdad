"""Adds the pages of the repository's top level to the site that mkdocs.yml describes.

mkdocs calls these functions by their names. Pages link one another as they lie in the repository,
so that they can be read there too; links to what the site has not lead to the repository.
"""

import pathlib
import posixpath
import re

import notebooks

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the top level, and what they are called in the site."""

NOTEBOOKS = {"docs/quickstart.ipynb": "quickstart.md"}
"""Notebooks, and the pages that show them."""


def on_files(files, config):
    """Adds the pages of the top level, and those of notebooks."""
    from mkdocs.structure.files import File

    for name, page in TOP.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for name, page in NOTEBOOKS.items():
        content = notebooks.markdown(notebooks.read(ROOT / name))
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown, page, **_):
    """Rewrites links that are meant for the repository."""
    here = {page: name for name, page in TOP.items()}.get(
        page.file.src_uri, f"docs/{page.file.src_uri}"
    )
    return rewritten(markdown, here=here, page=page.file.src_uri)


def rewritten(markdown: str, *, here: str, page: str) -> str:
    """Returns a page with the links of the site.

    Args:
        markdown: the page.
        here: its path in the repository.
        page: its path in the site.
    """

    def link(match: re.Match) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if path in TOP | NOTEBOOKS:
            path = (TOP | NOTEBOOKS)[path]
        elif path.startswith("docs/") and not path.startswith("docs/tools/"):
            path = path.removeprefix("docs/")
        else:
            # A file of the code: named, as the repository may lie anywhere.
            return "]"
        return f"]({posixpath.relpath(path, posixpath.dirname(page) or '.')}{anchor})"

    return re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", link, markdown)
