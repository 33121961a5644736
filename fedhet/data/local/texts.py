"""A column of texts at a site, as the token numbers that the run declares.

The tokenizer is no secret, but it decides what the numbers mean. So the run declares the SHA-256 of
its file, and each site has the file, beside its data or where its operator says.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhet.core.errors import DataError
from fedhet.data.tables import data_frames
from fedhet.data.tokens import Texts, find_tokenizer

if TYPE_CHECKING:
    import pandas

    from fedhet.data.local.declaration import Declaration

AT_SITE = """--node-config '... tokenizer="/path"'"""


def digest_of(tokenizer: Path) -> str:
    """The SHA-256 of a tokenizer.json, 64 hexadecimal digits."""
    return hashlib.sha256(tokenizer.read_bytes()).hexdigest()


def declared_texts(
    column: str,
    digest: str,
    tokens: int,
    named: Path | None,
    beside: Path,
    option: str = AT_SITE,
) -> Texts:
    """The texts of a column, with the tokenizer that the run declares.

    Args:
        column: the column.
        digest: the SHA-256 of the tokenizer.
        tokens: the number T of tokens of each text.
        named: the tokenizer.json or its folder; None: beside the data.
        beside: the folder of the data.
        option: how `named` is given, for messages.

    Raises:
        DataError: there is no tokenizer, or it is another one.
    """
    folders = [beside, beside / "tokenizer"] if named is None else [named]
    advice = f"It must be beside the data, in a folder tokenizer there, or be named: {option}"
    file = find_tokenizer(folders, f"dataset.text={column}", advice)
    if (own := digest_of(file)) != digest:
        raise DataError(
            f"{file} is not the tokenizer of this run: its SHA-256 begins with {own[:16]}, that of"
            f" dataset.tokenizer with {digest[:16]}"
        )
    return Texts(column, file, tokens)


def texts_at(declared: Declaration, named: Path | None, beside: Path) -> Texts | None:
    """The texts that a run declares, at a site; None for a run without a column of texts.

    Raises:
        DataError: as `declared_texts` does, or vocabulary or padding is not what the run declares.
    """
    if declared.text is None or declared.tokenizer is None:
        return None
    (tokens,) = declared.shape_of_sample
    texts = declared_texts(declared.text, declared.tokenizer, tokens, named, beside)
    for key, own in texts.described().items():
        if own != getattr(declared, key):
            raise DataError(
                f"{texts.file}: its {key} is {own}; the run declares {getattr(declared, key)}"
            )
    return texts


def tokens_of(texts: Texts, frame: pandas.DataFrame, source: str) -> np.ndarray:
    """(n, T) int64: the tokens of the texts in a table.

    Raises:
        DataError: a value is no text.
    """
    values = data_frames.text_values(frame, texts.column, source)
    (x,), _ = texts.encoded({source: values}, texts.max_length)
    return x
