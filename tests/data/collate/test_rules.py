"""A rule per field: the way into the batch, and whose lengths the batch reports."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import same as bitwise
from torchbudget import PackCollate, PadCollate
from torchbudget.errors import CollateError, OptionError

SAMPLES = [{"image": torch.ones(256), "ids": [1] * n} for n in (1, 3)]
KINDS = {PadCollate: "padded", PackCollate: "joined"}
collates = pytest.mark.parametrize("collate", KINDS)


class TestLengths:
    @collates
    def test_a_field_of_one_fixed_shape_is_not_taken_for_the_ragged_one(self, collate: Any) -> None:
        """It stands first, and its length is in every sample the same: nothing says which it is."""
        with pytest.raises(CollateError, match=r"'image' has the length 256, and field 'ids' 1"):
            collate()(SAMPLES)
        assert collate(fields={"image": "stacked"})(SAMPLES).lengths.tolist() == [1, 3]

    @collates
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
    def test_lengths_are_those_of_any_field_or_there_is_an_error(
        self, collate: Any, drawn: list[tuple[int, int]]
    ) -> None:
        """They depend neither on the order of the fields nor on which samples share a batch."""
        samples = [{"a": torch.ones(a), "b": torch.ones(b, 2)} for a, b in drawn]
        turned = [{"b": one["b"], "a": one["a"]} for one in samples]
        for one in (samples, turned):
            own = collate(fields={"a": KINDS[collate]})(one)
            assert own.lengths.tolist() == [b for _, b in drawn]
            assert own.measured_by("a").lengths.tolist() == [a for a, _ in drawn]
            if all(a == b for a, b in drawn):
                assert collate()(one).lengths.tolist() == [a for a, _ in drawn]
                continue
            position = next(i for i, (a, b) in enumerate(drawn) if a != b)
            with pytest.raises(CollateError, match=f"sample {position} of the batch.*fields="):
                collate()(one)


class TestNotJoined:
    """Fields beside the sequence, which the rules of the sequence do not fit."""

    def test_pixel_values_beside_ids(self) -> None:
        """Stacked images, in a packed batch, a padded one and a row; patches of any number."""
        samples = [
            {"input_ids": [1] * n, "pixel_values": pixels, "patches": torch.ones(2 * n, 5)}
            for n, pixels in ((2, torch.zeros(3, 4, 4)), (1, torch.ones(3, 4, 4)))
        ]
        rules = {"pixel_values": "stacked", "patches": "joined"}
        made = [collate(fields=rules) for collate in KINDS]
        row = PackCollate(fields=rules, layout="transformers", size_multiple=4)
        batch: Any
        for batch in [collate(samples) for collate in (*made, row)]:
            assert batch["pixel_values"].shape == (2, 3, 4, 4)
            assert batch["patches"].shape == (6, 5)
            assert batch.lengths.tolist() == [2, 1]
            last = batch.split(2)[1]
            assert bitwise(last["pixel_values"], samples[1]["pixel_values"][None])
            assert last["patches"].shape == (2, 5)
            assert [one["patches"].shape for one in batch.samples()] == [(4, 5), (2, 5)]
        other = samples[1] | {"pixel_values": torch.ones(3, 4, 5)}
        with pytest.raises(CollateError, match=r"sample 1 .*'pixel_values': expected the fixed"):
            made[0]([samples[0], other])

    @collates
    def test_anything_may_be_listed(self, collate: Any) -> None:
        """Targets of detection: dicts of tensors, of which samples have any number."""
        targets = [{"boxes": torch.ones(n, 4), "note": object()} for n in (2, 0)]
        samples = [{"x": [1] * n, "targets": targets[n - 1]} for n in (1, 2)]
        batch = collate(fields={"targets": "listed"})(samples)
        assert batch["targets"] == targets
        assert batch.split(2)[1]["targets"] == targets[1:]
        assert [one["targets"] for one in batch.samples()] == targets
        assert batch.to("meta")["targets"][0]["boxes"].is_meta
        assert "targets: list[2]" in repr(batch)
        assert [shapes.tolist() for shapes in batch.sample_shapes()] == [[[1], [2]], [[], []]]


OPTIONAL = {
    "text": "optional",
    "weight": "optional",
    "image": ("stacked", "optional"),
    "tags": "optional",
    "note": ("listed", "optional"),
}


class TestOptional:
    @collates
    @given(
        st.lists(st.sets(st.sampled_from(sorted(OPTIONAL))), min_size=1, max_size=5),
        st.booleans(),
        st.integers(1, 3),
    )
    def test_samples_with_and_without(
        self, collate: Any, drawn: list[set[str]], none: bool, parts: int
    ) -> None:
        """What a sample has comes back, and a part is what its samples make alone."""
        samples = []
        for i, has in enumerate(drawn):
            full = {
                "text": f"{i}", "weight": 0.5 + i, "image": torch.full((2, 2), i),
                "tags": np.arange(i), "note": {"any": i},
            }  # fmt: skip
            own = {name: full[name] for name in full if name in has}
            samples.append({"ids": [i] * (i + 1)} | (dict.fromkeys(full) if none else {}) | own)
        make = collate(fields=OPTIONAL)
        batch = make(samples)
        assert batch.lengths.tolist() == [i + 1 for i in range(len(drawn))]
        assert set(batch) == {"ids"}.union(*drawn)
        for name in OPTIONAL:
            assert batch.present(name).tolist() == [name in has for has in drawn]
        for part, start in zip(
            batch.split(min(parts, len(drawn))),
            [len(drawn) * i // min(parts, len(drawn)) for i in range(parts)],
            strict=False,
        ):
            alone = make(samples[start : start + part.num_samples])
            for name, value in alone.items():
                mine = part[name]
                assert bitwise(mine, value) if isinstance(value, torch.Tensor) else mine == value
            assert set(part) == set(alone)
        again = pickle.loads(pickle.dumps(batch))  # noqa: S301  (our own bytes)
        for came, has in zip(again.samples(), drawn, strict=True):
            assert set(came) == {"ids", *has}
        assert make(batch.samples())["ids"].equal(batch["ids"])

    @collates
    def test_what_is_wrong_names_the_sample(self, collate: Any) -> None:
        make = collate(fields={"x": "optional", "y": ("stacked", "optional")})
        ids = {"ids": [1]}
        with pytest.raises(CollateError, match=r"sample 2 .*'x': expected dtype .* as in sample 1"):
            make([ids, ids | {"x": torch.ones(1)}, ids | {"x": torch.ones(1).int()}])
        with pytest.raises(
            CollateError, match=r"sample 1 .*missing: \['ids'\], unexpected: \['z'\]"
        ):
            make([ids, {"z": [1], "x": [1]}])
        with pytest.raises(CollateError, match="'x' is a mapping of fields: name each"):
            make([ids | {"x": {"y": 1}}])


@collates
def test_rules_that_make_no_sense(collate: Any) -> None:
    for wrong in ("joined", {"x": "cut"}, {"x": ("padded", "joined")}, {"x": ()}, {"x": None}):
        with pytest.raises(OptionError, match="fields must be a mapping from field to rule"):
            collate(fields=wrong)
    with pytest.raises(CollateError, match=r"fields names field 'z'.*'s', 'x'"):
        collate(fields={"z": "stacked"})([{"s": "a", "x": [1]}])
    with pytest.raises(CollateError, match="'s': expected numbers, since the field is joined"):
        collate(fields={"s": "joined"})([{"s": "a", "x": [1]}])
    make = collate(fields={"x": "stacked"})
    assert pickle.loads(pickle.dumps(make)) == make  # noqa: S301  (our own bytes)
    assert hash(collate()) == hash(collate())
