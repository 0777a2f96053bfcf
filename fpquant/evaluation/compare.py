"""One loaded model, measured under one quantization after another: the rows of `fpquant compare`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fpquant.calibration.data import TokenData
from fpquant.checkpoint import ModuleSpec
from fpquant.errors import FpquantError
from fpquant.evaluation import tasks
from fpquant.evaluation.distance import (
    METRICS,
    Distance,
    Reference,
    chosen_windows,
    distance,
    is_plain,
    watched_head,
)
from fpquant.evaluation.inplace import InPlace, stored_bits
from fpquant.evaluation.perplexity import perplexity_protocol, perplexity_result, window_logits, window_loss
from fpquant.evaluation.plan import Cell, Plan
from fpquant.evaluation.records import Result
from fpquant.evaluation.statistics import BOOTSTRAP, mean_interval
from fpquant.evaluation.store import Store
from fpquant.finite import require_finite
from fpquant.models import LoadedModel, evaluation_mode, weight_of
from fpquant.progress import Track, no_progress
from fpquant.schemes import SCHEMES, Pair, block_count, get_pair


@dataclass(frozen=True)
class Row:
    """What was measured of one quantization. modules: shapes and high blocks; ratio: as achieved, of a pair.

    seconds: `quantize` (putting the weights in place), `forward` (what `eval` does too: the model's passes over the
    windows, and their losses), `total`.
    """

    name: str
    settings: dict[str, Any] | None
    axes: tuple[Any, ...]
    bits_per_weight: float
    ratio: float | None
    modules: dict[str, ModuleSpec]
    results: list[Result]
    seconds: dict[str, float]

    @property
    def is_original(self) -> bool:
        return self.settings is None

    @property
    def is_mixed(self) -> bool:
        return self.settings is not None and "policy" in self.settings

    @property
    def with_activations(self) -> bool:
        return self.settings is not None and "activations" in self.settings

    @property
    def is_uniform(self) -> bool:
        return not (self.is_original or self.is_mixed)

    def result(self, metric: str, dataset: str | None = None, task: str | None = None) -> Result | None:
        """The figure of that name, or None where it was not measured."""
        for r in self.results:
            if r.metric == metric and dataset in (None, r.protocol["dataset"]) and task in (None, r.task):
                return r
        return None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "settings": self.settings,
            "axes": list(self.axes),
            "bits_per_weight": self.bits_per_weight,
            "ratio_achieved": self.ratio,
            "modules": {n: {"shape": list(m.shape), "high_blocks": m.high_blocks} for n, m in self.modules.items()},
            "results": [r.to_dict() for r in self.results],
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Row:
        """The inverse of to_dict, also by way of JSON."""
        return cls(
            name=record["name"],
            settings=record["settings"],
            axes=tuple(record["axes"]),
            bits_per_weight=record["bits_per_weight"],
            ratio=record["ratio_achieved"],
            modules={
                n: ModuleSpec((m["shape"][0], m["shape"][1]), m["high_blocks"]) for n, m in record["modules"].items()
            },
            results=[Result.from_dict(r) for r in record["results"]],
            seconds=record["seconds"],
        )


@dataclass
class Corpus:
    """Windows of one text, those whose distances are measured, and what the original's head saw there once known."""

    data: TokenData
    protocol: dict[str, Any]
    chosen: list[int]
    reference: Reference | None = None

    @classmethod
    def of(cls, loaded: LoadedModel, data: TokenData, kl_windows: int) -> Corpus:
        protocol = perplexity_protocol(loaded.model, loaded.tokenizer, data)
        return cls(data, protocol, chosen_windows(len(data.ids), kl_windows))


def cells(plan: Plan, modules: Mapping[str, nn.Module]) -> list[Cell]:
    """All rows, in the order of tables: the original, uniform schemes by size, and what was asked for."""
    mixed, pair = plan.mixed(), get_pair(plan.pair)
    shapes = {n: (weight_of(m).shape[0], weight_of(m).shape[1]) for n, m in modules.items()}
    stored = {
        name: stored_bits({n: ModuleSpec(s, 0) for n, s in shapes.items()}, Pair(scheme))
        for name, scheme in SCHEMES.items()
    }
    bits = max(stored_bits(_expected(shapes, c.recipe.ratio), pair) for c in mixed if c.recipe is not None)
    return [Cell("original"), *plan.uniform(bits, stored), *mixed]


def _expected(shapes: Mapping[str, tuple[int, int]], ratio: float) -> dict[str, ModuleSpec]:
    return {n: ModuleSpec(s, round((1 - ratio) * s[0] * block_count(s[1]))) for n, s in shapes.items()}


def kept_row(store: Store, cell: Cell) -> Row | None:
    """A row that was finished before, under whatever name, or None."""
    record = store.load(cell.key)
    return None if record is None else replace(Row.from_dict(record), name=cell.name, axes=cell.axes)


@dataclass
class Comparer:
    """Measures rows of one model, and keeps each when it is done."""

    loaded: LoadedModel
    quantizer: InPlace
    corpora: Sequence[Corpus]
    questions: Sequence[tasks.Questions]
    store: Store
    limit: int | None = None
    batch_size: int | None = None
    track: Track = no_progress
    _clock: dict[str, float] = field(default_factory=lambda: {"forward": 0.0})

    def rows(self, cells: Sequence[Cell]) -> list[Row]:
        """All rows: those of the store, and the others measured now. The weights are the original's afterwards."""
        with self.quantizer:
            return [
                kept_row(self.store, cell) or self._measure(cell, f"{i}/{len(cells)}")
                for i, cell in enumerate(cells, 1)
            ]

    def _measure(self, cell: Cell, position: str) -> Row:
        if cell.recipe is not None:
            self._references()
        start, self._clock = time.perf_counter(), {"quantize": 0.0, "forward": 0.0}
        modules: dict[str, ModuleSpec] = {}
        bits, ratio = 8.0 * self.loaded.stored_dtype.itemsize, None
        if cell.recipe is None:
            self.quantizer.restore()
        else:
            applied = self.quantizer.apply(cell.recipe)
            modules, bits, ratio = applied.modules, applied.bits_per_weight, applied.ratio
        self._clock["quantize"] = time.perf_counter() - start
        results = []
        try:
            for corpus in self.corpora:
                results += self._perplexity(cell, corpus, f"{position} {cell.name}")
            for questions in self.questions:
                results += tasks.measure(
                    questions, self.loaded, limit=self.limit, batch_size=self.batch_size, track=self.track
                )
        except FpquantError as error:
            raise FpquantError(f"{cell.name}: {error}") from error
        seconds = self._clock | {"total": time.perf_counter() - start}
        row = Row(cell.name, cell.settings, cell.axes, bits, ratio, modules, results, seconds)
        self.store.save(cell.key, row.to_dict())
        return row

    def _references(self) -> None:
        """What the original's head saw, where its row was measured in another run."""
        for corpus in self.corpora:
            if corpus.chosen and corpus.reference is None:
                self.quantizer.restore()
                self._original(corpus, corpus.chosen, "Original again")

    def _perplexity(self, cell: Cell, corpus: Corpus, label: str) -> list[Result]:
        if cell.recipe is None:
            losses = self._original(corpus, range(len(corpus.data.ids)), label)
            return [perplexity_result(losses, corpus.protocol)]
        losses, distances = self._quantized(corpus, label)
        found = replace(perplexity_result(losses, corpus.protocol), activations=self.quantizer.take_counts())
        return [found, *_distance_results(distances, corpus)]

    @torch.inference_mode()
    def _original(self, corpus: Corpus, windows: Sequence[int], label: str) -> np.ndarray:
        """Losses of the original, float64 [windows], and its reference."""
        model, plain = self.loaded.model, True
        losses: list[float] = []
        hidden: dict[int, Tensor] = {}
        watched: AbstractContextManager[list[Tensor]] = watched_head(model) if corpus.chosen else nullcontext([])
        with watched as seen:
            for index, logits in self._logits(corpus, windows, label):
                losses.append(self._loss(corpus, windows, losses, logits))
                if index in corpus.chosen:
                    entered = seen[-1]
                    hidden[index] = entered.cpu()
                    plain = plain and is_plain(model, entered, logits)
        if corpus.chosen:
            corpus.reference = Reference(hidden, plain)
        return np.array(losses)

    @torch.inference_mode()
    def _quantized(self, corpus: Corpus, label: str) -> tuple[np.ndarray, list[Distance]]:
        """Losses, float64 [windows], and the distances in the chosen windows."""
        windows = range(len(corpus.data.ids))
        losses: list[float] = []
        distances = []
        for index, logits in self._logits(corpus, windows, label):
            losses.append(self._loss(corpus, windows, losses, logits))
            if corpus.reference is not None and index in corpus.chosen:
                original = corpus.reference.logits(self.loaded.model, index, corpus.data.ids[index])
                distances.append(distance(original, logits))
        return np.array(losses), distances

    def _logits(self, corpus: Corpus, windows: Sequence[int], label: str) -> Iterator[tuple[int, Tensor]]:
        model = self.loaded.model
        with evaluation_mode(model):
            for index in self.track(windows, label, len(windows)):
                start = time.perf_counter()
                logits = window_logits(model, corpus.data.ids[index])
                if logits.is_cuda:
                    torch.cuda.synchronize(logits.device)
                self._clock["forward"] += time.perf_counter() - start
                yield index, logits

    def _loss(self, corpus: Corpus, windows: Sequence[int], before: Sequence[float], logits: Tensor) -> float:
        """The loss of the next window, stopping at the first that is not finite."""
        start = time.perf_counter()
        loss = window_loss(logits, corpus.data.ids[windows[len(before)]])
        self._clock["forward"] += time.perf_counter() - start
        if not np.isfinite(loss):
            require_finite(self.loaded.model, np.array([*before, loss]), corpus.data.ids[list(windows)])
        return loss


def _distance_results(distances: Sequence[Distance], corpus: Corpus) -> list[Result]:
    kept = ("dataset", "window", "bos", "dtype", "data_fingerprint")
    protocol = {k: corpus.protocol[k] for k in kept} | {
        "windows": len(corpus.chosen),
        "chosen": corpus.chosen,
        "unit": "nats a token; agreement is a share of tokens",
        "interval": BOOTSTRAP,
    }
    results = []
    for metric in METRICS if distances else ():
        values = [float(getattr(d, metric)) for d in distances]
        results.append(
            Result("distance", metric, float(np.mean(values)), mean_interval(values), protocol, windows=values)
        )
    return results
