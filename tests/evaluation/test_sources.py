"""Which texts are of one source."""

import pytest

from fpquant.evaluation.sources import source_warning


@pytest.mark.parametrize(
    ("calibration", "evaluation", "says"),
    [
        ("wikitext", "wikitext", "parts of wikitext"),
        ("wikitext", "vital-articles", "Wikipedia"),
        ("data/wikitext/validation.parquet", "data/wikitext/test.parquet", "Wikipedia"),
        ("wikitext", "/data/wikitext-2/test.parquet", "Wikipedia"),
        ("a/mail.txt", "./a/../a/mail.txt", "mail in"),
        ("a/mail_train.txt", "a/mail_test.jsonl", "mail in"),
        ("a/train.txt", "a/test.txt", "splits in"),
        ("a/mail.txt", "a/code.txt", None),
        ("a/mail.txt", "b/mail.txt", None),
        ("wikitext", "b/law.txt", None),
    ],
)
def test_sources(calibration, evaluation, says):
    found = source_warning(calibration, evaluation)
    assert (found is None) if says is None else (says in found)


def test_the_same_file(text_file):
    assert "the same file" in source_warning(str(text_file), str(text_file))
