"""The text of Python's language reference: its documents, its order, and what a Python without it prints."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from normlab.base.errors import DataError
from normlab.data.files import REFERENCE_MODULE, ReferenceText


def use_topics(monkeypatch: pytest.MonkeyPatch, topics: dict[str, str]) -> None:
    monkeypatch.setitem(sys.modules, REFERENCE_MODULE, SimpleNamespace(topics=topics))  # pyright: ignore[reportArgumentType]


def test_documents_are_the_topics_sorted_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_topics(monkeypatch, {"while": "The loop.", "empty": "", "assert": "The check."})
    text = ReferenceText()
    assert list(text.documents(tmp_path)) == ["The check.", "The loop."]
    assert (text.counts.documents, text.counts.empty) == (2, 1)


def test_the_key_depends_on_names_and_texts_and_not_on_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for topics in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1", "b": "3"}, {"a": "1", "c": "2"}):
        use_topics(monkeypatch, topics)
        keys.append(ReferenceText().key["source_sha256"])
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_python_without_the_reference_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, REFERENCE_MODULE, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"data=reference: this Python lacks the module pydoc_data.topics; .*stdlib"):
        ReferenceText()
