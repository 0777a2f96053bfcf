"""Which tile a shape gets: the table in code is what the committed script makes of the committed measurements."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from fpquant.kernels.tc_fpx.tiles import TILES, chosen_tile

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("tune_fpx")


@pytest.fixture
def table(tune):
    return tune.table


def dense(batch, shape, us):
    return {"shape": shape, "batch": batch, "us": us, "tile": None, "blocks": 0, "cluster": 0}


def times(batch, shape, **of_tile):
    tiles = {"small": [64, 512, 16, 1], "large": [128, 256, 32, 2]}
    row = {"shape": shape, "batch": batch, "blocks": 1, "cluster": 1}
    return [row | {"us": us, "tile": tiles[t]} for t, us in of_tile.items()]


@pytest.mark.parametrize(("weights", "results"), [("fp6_e3m2", "fpx-tune-h200"), ("nvfp4/fp8", "mixed-tune-h200")])
def test_the_table_is_made_from_the_measurements(weights, results, table):
    measured = json.loads((BENCHMARKS / "results" / f"{results}.json").read_text())["results"]
    assert measured["format"] == weights
    assert tuple(table(measured["times"])) == TILES[weights]


def test_a_shape_gets_a_tile_of_its_own_only_where_that_is_clearly_faster(table):
    small, large = ((64, 512, 16, 1), 1, 1), ((128, 256, 32, 2), 1, 1)
    edge = round((4096 * 4096 * 8192 * 28672) ** 0.5)
    both = times(16, "7b.o", small=10, large=10.2) + times(16, "70b.down", small=60, large=50)
    assert table(both) == [(16, 0, *large)]
    both = times(16, "7b.o", small=10, large=13) + times(16, "70b.down", small=60, large=50)
    assert table(both) == [(16, edge, *small), (16, 0, *large)]
    more = times(32, "7b.o", small=20, large=26) + times(32, "70b.down", small=60, large=50)
    assert table(both + more) == [(32, edge, *small), (32, 0, *large)], "batches with the same choice are one"
    assert table([*both, dense(16, "7b.o", 1)]) == table(both)


def test_the_fused_kernel_is_used_as_long_as_it_is_faster_over_all_shapes(tune):
    measured = []
    for batch, us in ((64, 20), (128, 29), (256, 31), (512, 10)):
        for shape in ("7b.o", "70b.down"):
            measured += [*times(batch, shape, small=us, large=us + 1), dense(batch, shape, 30)]
    assert tune.fused_batch(measured) == 128
    assert tune.fused_batch(times(64, "7b.o", small=1)) == 0


@pytest.mark.parametrize("table", TILES)
@pytest.mark.parametrize("weights", [1, 192 * 576, 4096 * 4096, 57344 * 8192, 1 << 40])
def test_every_shape_and_batch_has_a_tile(weights, table):
    for batch in [*range(1, 300), 1000, 5000]:
        (_, _, tile_batch, *_), blocks, cluster = chosen_tile(table, weights, batch)
        assert blocks in (1, 2, 3, 4) and cluster in (1, 2, 4)
        if weights >= 4096 * 4096:  # smaller ones stay in the cache
            assert tile_batch >= min(batch, 16), "no weight is read twice for a batch that one small tile holds"
