"""Pipelines of webdataset."""

from __future__ import annotations

from torchbudget.data.stream.adapters.plain import PlainSource


class WebdatasetSource(PlainSource):
    """It splits itself by rank and worker, as its pipeline says."""

    split = "ranks"
