"""Hooks of mkdocs.yml: pages outside docs/, the page of options, links to source files, names of the Python API.

python -m mkdocs build --strict
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from dino_ds.options.commands import help_text

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "ds_configs/README.md": "ds_configs.md",
    "ds_configs/tiers/README.md": "ds_configs_tiers.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docs/notebook.ipynb": "notebook.md",
}
"""In the repository -> on the site; those in docs/ keep their names."""
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]*)(#[^)]*)?\)")
_EXPORTS = "<!-- one section for each name that dino_ds exports -->"


def on_config(config: MkDocsConfig) -> None:
    """Anchors of headings as GitHub makes them."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda heading, separator: re.sub(
        r"[^\w -]", "", heading.lower()
    ).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The site's files with the pages outside docs/, and with every file that a page links to in source/."""
    pages = {file.src_uri: Path(file.abs_src_path or "") for file in files if file.is_documentation_page()}
    texts = {uri: (path.read_text(), path.parent) for uri, path in pages.items()}
    texts |= {uri: (_text(ROOT / name), (ROOT / name).parent) for name, uri in PAGES.items()}
    texts["configs.md"] = (
        f"---\nhide: [toc]\n---\n# Options\n\n```text\n{help_text(['train', '--help', 'all'])}\n```\n",
        ROOT / "docs",
    )
    for uri, (text, folder) in texts.items():
        if existing := files.get_file_from_path(uri):
            files.remove(existing)
        for linked in _LINK.finditer(text):
            target = _target(linked[3], folder)
            if target is not None and target.startswith("source/") and files.get_file_from_path(target) is None:
                content = (ROOT / target.removeprefix("source/")).read_bytes()
                files.append(File.generated(config, target, content=content))
        files.append(File.generated(config, uri, content=_on_site(text, folder, uri)))
    return files


def _text(page: Path) -> str:
    """Text of a page; of a notebook its cells, and what they printed and drew."""
    if page.suffix != ".ipynb":
        return page.read_text()
    parts = []
    for cell in json.loads(page.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        outputs = cell.get("outputs", [])
        if printed := "".join("".join(output.get("text", "")) for output in outputs):
            parts.append(f"```text\n{printed}\n```")
        drawn = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        parts += [
            f'<img alt="drawn by these lines" src="data:image/png;base64,{"".join(png.split())}">' for png in drawn
        ]
    parts.insert(1, f'<a href="{page.name}" download>The notebook</a> itself, to be run.')
    return "\n\n".join(parts)


def _on_site(text: str, folder: Path, uri: str) -> str:
    """A page of `folder` with its links as they are on the site, where it is `uri`."""

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found.groups()
        there = _target(target, folder) if target else ""
        if there is None:
            return words
        return f"{image}[{words}]({there and os.path.relpath(there, os.path.dirname(uri) or '.')}{anchor or ''})"

    return _LINK.sub(link, text).replace(_EXPORTS, _exports() if _EXPORTS in text else "")


def _target(link: str, folder: Path) -> str | None:
    """The target of a link on the site, or None for a folder. Raises ValueError for what is not in the repository."""
    if not link:
        return None
    path = os.path.relpath((folder / link).resolve(), ROOT)
    if path.startswith(".."):
        raise ValueError(f"{link}: not in the repository")
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return None if (ROOT / path).is_dir() else f"source/{path}"


def _exports() -> str:
    """mkdocstrings' blocks for the names of the Python API, where they are defined."""
    import dino_ds

    blocks = []
    for name in getattr(dino_ds, "__all__", ["load"]):
        thing: Any = getattr(dino_ds, name)
        blocks.append(f'::: {thing.__module__}.{thing.__qualname__}\n    options:\n      heading: "dino_ds.{name}"\n')
    return "\n".join(blocks)
