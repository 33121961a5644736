"""Texts as token numbers, made by a tokenizer that is saved with the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.files import check_memory, log, permitted, roots
from fedhet.data.forms import read_object

if TYPE_CHECKING:
    import tokenizers


FILE = "tokenizer.json"  # as Hugging Face's `tokenizers` and `save_pretrained` write it
SETTINGS = "tokenizer_config.json"  # of `save_pretrained`; it names the padding token


@dataclass(frozen=True)
class Texts:
    """A column of texts, and the settings that turn its texts into token numbers.

    Args:
        column: the name of the column.
        file: the path of tokenizer.json.
        max_length: the largest number of tokens of a sample; further tokens are cut off.
        filled: whether samples are padded to `max_length` tokens, not to the longest sample.
    """

    column: str
    file: Path
    max_length: int
    filled: bool = False

    @classmethod
    def of(
        cls, text: str | None, tokenizer: str | None, max_length: int, data_dir: str, folder: Path
    ) -> Texts | None:
        """Build `Texts` from the settings of a dataset; None if `text` is None.

        Args:
            text: the column.
            tokenizer: the folder of the tokenizer, or its file; absolute, or relative to `data_dir`
                or `folder`. None: `folder`, or the folder "tokenizer" in it.
            max_length: see above.
            data_dir: the setting `data_dir`.
            folder: the folder of the data.

        Raises:
            ConfigError: a setting is not allowed, or `tokenizer` is given without `text`.
            DataError: there is no tokenizer.
        """
        check.optional(check.text, "dataset.tokenizer", tokenizer)
        check.integer("dataset.max_length", max_length, low=1)
        if text is None:
            if tokenizer is not None:
                raise ConfigError(
                    f"dataset.tokenizer={tokenizer}: dataset.text must name the column of texts"
                )
            return None
        check.text("dataset.text", text)
        if tokenizer is None:
            folders = [folder, folder / "tokenizer"]
        else:
            named = Path(tokenizer).expanduser()
            folders = [permitted(place / named) for place in (*roots(data_dir), folder)]
        advice = (
            "set dataset.tokenizer to the folder that save_pretrained of Hugging Face's"
            " transformers writes, or to the file that Tokenizer.save of its tokenizers writes"
        )
        return cls(text, find_tokenizer(folders, f"dataset.text={text}", advice), max_length)

    @property
    def key(self) -> dict[str, Any]:
        """What determines the tokens, for the cache."""
        files = [self.file, self.file.with_name(SETTINGS)]
        return {
            "text": self.column,
            "max_length": self.max_length,
            "tokenizer": signature([file for file in files if file.is_file()]),
        }

    def encoded(self, texts: Mapping[str, Sequence[str]]) -> tuple[list[np.ndarray], Arrays]:
        """Return the texts as token numbers.

        Args:
            texts: the texts of each part, by the part's name in messages.

        Returns:
            For each part (n, T) int64; and the arrays vocabulary and padding.

        Raises:
            ConfigError: the package `tokenizers` is missing.
            DataError: the tokenizer is damaged, or no text has a token.
        """
        tokenizer = _load(self.file)
        described = self.described(tokenizer)
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_length)
        parts = {source: tokenizer.encode_batch(list(each)) for source, each in texts.items()}
        lengths = [len(one.ids) for part in parts.values() for one in part]
        if not max(lengths, default=0):
            raise DataError(f"{', '.join(texts)}, column {self.column!r}: no text has a token")
        log.info(
            "dataset.text=%s: %d texts of %d to %d tokens; %d were cut to %d",
            self.column,
            len(lengths),
            min(lengths),
            max(lengths),
            sum(bool(one.overflowing) for part in parts.values() for one in part),
            self.max_length,
        )
        width = self.max_length if self.filled else max(lengths)
        check_memory(8 * len(lengths) * width, f"dataset.text={self.column}")
        tokens = []
        for part in parts.values():
            x = np.full((len(part), width), described["padding"], np.int64)
            for row, one in zip(x, part, strict=True):
                row[: len(one.ids)] = one.ids
            tokens.append(x)
        return tokens, {key: np.array(value) for key, value in described.items()}

    def described(self, tokenizer: tokenizers.Tokenizer | None = None) -> dict[str, int]:
        """Return the vocabulary size and the padding token; reads `file` if no tokenizer is given.

        Raises:
            ConfigError, DataError: as `encoded` does.
        """
        tokenizer = tokenizer or _load(self.file)
        size = tokenizer.get_vocab_size()
        if tokenizer.padding is not None:
            padding = int(tokenizer.padding["pad_id"])
        else:
            settings = self.file.with_name(SETTINGS)
            token = read_object(settings, given=True).get("pad_token") if settings.is_file() else ""
            if isinstance(token, dict):  # the token with its properties
                token = token.get("content")
            number = tokenizer.token_to_id(token) if isinstance(token, str) else None
            padding = size if number is None else int(number)  # size: add a token for padding
        return {"vocabulary": max(size, padding + 1), "padding": padding}


def find_tokenizer(places: Sequence[Path], where: str, advice: str) -> Path:
    """Return the absolute path of the first tokenizer.json that exists.

    Args:
        places: folders that may contain it, or paths of files.
        where: the setting that needs it; the error message begins with it.
        advice: what the user can do; the error message ends with it.

    Raises:
        DataError: none of the files exists.
    """
    files = [each if each.suffix == ".json" else each / FILE for each in places]
    for file in files:
        if file.is_file():
            return file.absolute()
    looked = ", ".join(map(str, files))
    raise DataError(f"{where}: there is no tokenizer; looked for {looked}. {advice}")


def _load(file: Path) -> tokenizers.Tokenizer:
    check.installed("dataset.text", "tokenizers", extra="text")
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing more specific
        raise DataError(f"{file} is damaged, or not a tokenizer: {error}") from error
