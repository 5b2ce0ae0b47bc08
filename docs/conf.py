"""Sphinx: `python -m sphinx -n -W -b html docs docs/_build/html`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring

import torchbudget

project = "torchbudget"
author = "The torchbudget developers"
copyright = author  # noqa: A001  (Sphinx's own name)
release = torchbudget.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"torchbudget {release}"

default_role = "code"  # docstrings name code in single backticks, as Markdown does
napoleon_custom_sections = ["Complexity"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # their aliases tell less than each docstring's prose
autodoc_preserve_defaults = True

# Every name is documented where users import it from, which is not where it is defined. Errors
# are defined there, and those that stand on top too keep their module.
for module in (torchbudget, torchbudget.readers, torchbudget.transforms):
    for name in module.__all__:
        public = getattr(module, name)
        if getattr(public, "__module__", "torchbudget.errors") != "torchbudget.errors":
            public.__module__ = module.__name__

nitpick_ignore_regex = [
    # Sphinx would look these up in other projects' inventories, which a build without network
    # does not have: bases of classes, and the built-in exceptions.
    (r"py:.*", r"(collections|torch|typing|abc|numpy)\..*"),
    (r"py:.*", r"(object|Generic|Protocol|Sampler|Mapping|Sequence)"),
    (r"py:.*", r"(ValueError|OverflowError|RuntimeError|ImportError|UserWarning|Exception)"),
    # Bases that hold what batches and costs have in common; their members are documented with them.
    (r"py:class", r"torchbudget\.(cost|data|plan)\..*"),
]


def _property(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    """Read a property's docstring as a method's.

    Napoleon takes the first words before a colon for its type, and knows no sections in it.
    """
    if what == "property":
        read = GoogleDocstring(lines, app.config, app, "method", name, obj, options)
        lines[:] = ["..", "", *read.lines()]  # an empty comment, which it may take for the type


def setup(app: Sphinx) -> None:
    """Before Napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _property, priority=400)
