from __future__ import annotations

import pickle

import pytest

from torchbudget import PackCollate
from torchbudget.errors import CollateError


def test_a_length_field_must_exist_and_be_ragged() -> None:
    for name, match in (("z", "names field 'z'"), ("n", "no ragged axis")):
        with pytest.raises(CollateError, match=match):
            PackCollate(fields=drawn.rules("joined"))([{"n": 1, "x": [1]}])


def test_a_collate_is_a_value() -> None:
    collate = PackCollate(length_field="x")
    assert pickle.loads(pickle.dumps(collate)) == collate  # noqa: S301  (our own bytes)
