"""Shares of high blocks by layer and module type, and their picture."""

import pytest

from fpquant.checkpoint import ModuleSpec
from fpquant.report.shares import heat_map, shares

MODULES = {
    "model.layers.10.mlp.up": ModuleSpec((8, 64), 8),
    "model.layers.2.mlp.up": ModuleSpec((8, 64), 16),
    "model.layers.2.attn.q": ModuleSpec((4, 40), 3),
    "model.head": ModuleSpec((1, 16), 0),
}


def test_counts_by_layer_and_kind():
    found = shares(MODULES)
    assert found.layers == [-1, 2, 10]
    assert found.kinds == ["model.head", "attn.q", "mlp.up"]
    assert found.share(2, "attn.q") == 3 / 12
    assert found.share(2) == 19 / 44
    assert found.share(kind="mlp.up") == 24 / 64
    assert found.share() == 27 / 77
    assert found.share(10, "attn.q") is None


@pytest.mark.parametrize(("name", "head"), [("map.png", b"\x89PNG"), ("map.svg", b"<?xml")])
def test_the_heat_map_is_a_picture(name, head, tmp_path):
    heat_map(shares(MODULES), "title", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)
