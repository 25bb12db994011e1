"""Draw the diagrams of the documents as SVG, for the site; needs chromium and npm. Run by `make pictures`."""

import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

from hooks import FENCE, ROOT, diagram_file

from sr_assets_tests.browser import find_chromium, open_page

MERMAID = "mermaid@11.12.0"
#: Text as SVG text, because a picture in a page may contain no HTML.
OPTIONS = '{startOnLoad: false, htmlLabels: false, flowchart: {htmlLabels: false}, theme: "neutral", fontFamily: "sans-serif"}'


def diagrams() -> dict[str, str]:
    """Return the text of each diagram by the name of its picture."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    blocks = (block for document in documents for block in FENCE.finditer(document.read_text()))
    return {diagram_file(block[3]): block[3] for block in blocks if block[2] == "mermaid"}


def main() -> None:
    """Draw missing pictures and delete those without a diagram."""
    wanted, folder = diagrams(), ROOT / "docs" / "diagrams"
    folder.mkdir(exist_ok=True)
    for picture in folder.glob("*.svg"):
        if f"diagrams/{picture.name}" not in wanted:
            picture.unlink()
    missing = {name: text for name, text in wanted.items() if not (ROOT / "docs" / name).exists()}
    if not missing:
        return
    browser = find_chromium()
    assert browser is not None, "chromium is missing; install it"
    with tempfile.TemporaryDirectory() as scratch, open_page(browser) as page:
        subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extract("package/dist/mermaid.min.js", scratch, filter="data")
        page.add_script_tag(path=f"{scratch}/package/dist/mermaid.min.js")
        page.evaluate(f"mermaid.initialize({OPTIONS})")
        for name, text in missing.items():
            drawn = page.evaluate("text => mermaid.render('diagram', text).then(result => result.svg)", text)
            # Its own size, on white also in a dark page.
            own = re.search(r"max-width: ([\d.]+)px", drawn)
            assert own is not None, drawn[:200]
            drawn = drawn.replace('width="100%"', f'width="{own[1]}"', 1)
            drawn = drawn.replace("background-color: transparent", "background-color: white")
            (ROOT / "docs" / name).write_text(drawn + "\n")
            print(f"drew docs/{name}")


if __name__ == "__main__":
    main()
