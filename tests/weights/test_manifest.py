from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from laminar.errors import WeightsError
from laminar.types import Version
from laminar.weights import Layout, Manifest, fingerprint_of

SHAPES = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=6,
    unique_by=lambda pair: pair[0],
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@given(shapes=SHAPES)
def test_ranges_have_no_gaps_and_fit_their_shapes(dtype: str, shapes: list[tuple[str, tuple[int, ...]]]) -> None:
    layout = Layout.of(shapes, dtype)
    itemsize = {"fp32": 4, "bf16": 2}[dtype]
    end = len(layout.header)
    for entry, (name, shape) in zip(layout, shapes, strict=True):
        assert (entry.name, entry.shape, entry.start) == (name, shape, end)
        end += torch.Size(shape).numel() * itemsize
        assert entry.stop == end
    assert layout.size == end
    assert len(layout.header) % 64 == 0
    assert Layout.from_json(layout.to_json()) == layout


def test_a_file_made_by_hand_is_read_by_stock_safetensors(tmp_path: Path) -> None:
    layout = Layout.of({"b": (2, 3), "a": (4,)}.items(), "fp32")
    path = tmp_path / "hand.safetensors"
    path.write_bytes(layout.header + torch.arange(10, dtype=torch.float32).numpy().tobytes())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("b").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.get_tensor("a").tolist() == [6, 7, 8, 9]


def test_header_says_the_same_as_one_of_the_library(tmp_path: Path) -> None:
    tensors = {"b": torch.zeros(2, 3, dtype=torch.bfloat16), "a": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "stock.safetensors", metadata={"format": "pt"})
    stock = (tmp_path / "stock.safetensors").read_bytes()
    ordered = sorted((name, tensor.shape) for name, tensor in tensors.items())
    header = Layout.of(ordered, "bf16").header
    assert json.loads(header[8:]) == json.loads(stock[8 : 8 + int.from_bytes(stock[:8], "little")])


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        ([("a", (1,))], "fp16", "'fp16'"),
        ([("a", (1,)), ("a", (2,))], "fp32", "'a'"),
        ([("__metadata__", (1,))], "fp32", "'__metadata__'"),
    ],
)
def test_layouts_that_can_not_be(shapes: list[tuple[str, tuple[int, ...]]], dtype: str, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        Layout.of(shapes, dtype)


def test_a_stored_layout_that_was_changed_is_refused() -> None:
    fields = json.loads(Layout.of([("a", (2,))], "fp32").to_json())
    fields["tensors"][0][1] = [3]
    with pytest.raises(WeightsError, match="was stored as"):
        Layout.from_json(json.dumps(fields))


def test_manifest_survives_json_exactly() -> None:
    manifest = Manifest(Version(1, 7), "bf16", "ab", ("01", "02"), (-0.1, -1e-9, -123.456), "cd")
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_fingerprint_depends_on_every_digest_and_their_order() -> None:
    fingerprints = [fingerprint_of(digests) for digests in (["00", "01"], ["01", "00"], ["00"], [], ["00", "02"])]
    assert len(set(fingerprints)) == len(fingerprints)
