"""The documentation as a site: ``make docs``. Pages are the Markdown files beside this one."""

import re
from typing import Any

from dsv41 import __version__

project, author, release = "dsv41", "the dsv41 authors", __version__
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["results"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"dsv41 {__version__}"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
# Pages of their own; the same text is read on GitHub, where files are linked as files.
suppress_warnings = ["myst.header"]


def _as_written(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: the first paragraph as a paragraph, the rest as it stands in the code."""
    text = "\n".join(lines).strip("\n")
    first, _, rest = text.partition("\n\n")
    lines[:] = [re.sub(r"([*_\\|])", r"\\\1", re.sub(r"``?", "", first)).replace("\n", " "), ""]
    if rest.strip():
        lines += [".. code-block:: text", "", *(f"   {line}" for line in rest.splitlines()), ""]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _as_written)
