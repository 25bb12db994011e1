"""The documents as pages of the site: links between repository and site, kinds of blocks, diagrams as pictures."""

import hashlib
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from sr_assets.operate.webserver import anchor

ROOT = Path(__file__).parent.parent
#: Documents above docs/ that are pages of the site.
OUTSIDE = ("BENCH.md", "CHANGELOG.md", "CONTRIBUTING.md")
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def diagram_file(text: str) -> str:
    """Return the name of the picture of a mermaid diagram; `make pictures` draws it."""
    return f"diagrams/{hashlib.sha256(text.encode()).hexdigest()[:12]}.svg"


def on_config(config: MkDocsConfig) -> None:
    """List all decisions in the navigation, and make anchors as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = lambda heading, _separator: anchor(heading)
    decisions = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    pages = ["decisions/README.md", *(f"decisions/{file.name}" for file in decisions)]
    for tab in config.nav or ():
        for sections in tab.values():
            for section in sections:
                if isinstance(section, dict) and "Decisions" in section:
                    section["Decisions"] = pages


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the documents above docs/."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return a page for the site."""
    own = page.file.src_uri
    source = own if own in OUTSIDE else f"docs/{own}"
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_with_links(markdown[end : fence.start()], source, own), _block(fence, own)]
        end = fence.end()
    return "".join([*parts, _with_links(markdown[end:], source, own)])


def _block(fence: re.Match[str], own: str) -> str:
    indent, kind, text = fence.groups()
    if kind != "mermaid":
        return f"{indent}```{kind.partition(' ')[0]}\n{text}{indent}```"
    picture = diagram_file(text)
    if not (ROOT / "docs" / picture).exists():
        raise PluginError(f"{own}: a diagram has no picture docs/{picture}; run `make pictures`")
    return f"{indent}![A diagram]({posixpath.relpath(picture, posixpath.dirname(own) or '.')})"


def _with_links(text: str, source: str, own: str) -> str:
    """Point the links of a document, which are relative to its file, to pages of the site; keep only the text of others."""

    def on_site(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        path, _, heading = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if file == "README.md":
            page = "index.md"
        elif file in OUTSIDE:
            page = file
        elif file.startswith("docs/"):
            page = file.removeprefix("docs/")
        else:
            return str(label)
        if not Path(page).suffix:
            page = f"{page}/README.md"
        relative = posixpath.relpath(page, posixpath.dirname(own) or ".")
        return f"{image}[{label}]({relative}{'#' if heading else ''}{heading})"

    return re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(([^)\s]+)\)", on_site, text)
