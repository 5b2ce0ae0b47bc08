"""Sources: what a stream asks of them, and the data sets of other libraries that differ."""

from __future__ import annotations

from typing import Any, Final

from torchbudget.data.stream.adapters.datasets import DatasetsSource
from torchbudget.data.stream.adapters.plain import PlainSource
from torchbudget.data.stream.adapters.ray import RaySource
from torchbudget.data.stream.adapters.webdataset import WebdatasetSource

_MODULES: Final = {
    "datasets.iterable_dataset.": DatasetsSource,
    "webdataset.": WebdatasetSource,
    "ray.data.": RaySource,
}


def adapter_of(data: Any) -> PlainSource:
    """The adapter of a source, found by the module of its class or of one of its base classes."""
    for kind in type(data).__mro__:
        for module, adapter in _MODULES.items():
            if f"{kind.__module__}.".startswith(module):
                return adapter(data)
    return PlainSource(data)
