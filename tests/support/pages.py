"""The pages of the documentation, and the code in them."""

import re

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "jaxonnx" / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.stem != "reference"]


def blocks(page, language):
    """The code of a page, except what is marked as not to be run."""
    found = re.findall(rf"(<!-- [^\n]* -->\n)?```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    return [code for mark, code in found if "not run" not in mark]
