# SPDX-License-Identifier: Apache-2.0
"""Long real texts: the user's files, or what Python and installed packages ship."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import platform
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from tandemkv.cache_rank.calibration.format import CalibrationError
from tandemkv.cache_rank.protocol.errors import SettingsError

from .tokenizing import Tokenizer

SUFFIXES = (".txt", ".md", ".rst", ".py", ".tex")
PACKAGE_PREFIX = "package:"
_SHORTEST_TOPIC = 4000
_SHORTEST_FILE = 800
_LONGEST_PACKAGE = 2_000_000
"""Characters: about 600,000 tokens, more than a campaign asks for."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts by name, in a fixed order; `absent` says which built-in ones this machine lacks."""

    texts: dict[str, str]
    absent: tuple[str, ...] = ()

    def describe(self) -> list[dict[str, str | int]]:
        """Name, size and hash of each text, for the report."""
        hashes = {name: hashlib.sha256(text.encode()) for name, text in self.texts.items()}
        return [
            {"name": name, "characters": len(text), "sha256": hashes[name].hexdigest()[:16]}
            for name, text in self.texts.items()
        ]


def read_corpus(paths: Sequence[Path]) -> Corpus:
    """Read files, or every text below folders, sorted by path; ``.json`` maps names to texts.

    ``package:NAME`` is the source of an installed package: a text that every user has. Raises
    `SettingsError` if a path cannot be read or there is no text in it.
    """
    texts: dict[str, str] = {}
    for path in paths:
        package = str(path).removeprefix(PACKAGE_PREFIX)
        if package != str(path):
            texts[str(path)] = package_source(package)
        elif path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES):
                texts[_free(str(file.relative_to(path)), texts)] = read_text(file)
        elif path.suffix == ".json":
            for name, text in _read_json(path).items():
                texts[_free(name, texts)] = text
        else:
            texts[_free(path.name, texts)] = read_text(path)
    texts = {name: text for name, text in texts.items() if text.strip()}
    if not texts:
        named = ", ".join(map(str, paths))
        raise SettingsError(
            f"corpus={named}: no text there; give text files, a folder with some of "
            f"{' '.join(SUFFIXES)}, or a JSON object of name to text"
        )
    return Corpus(texts)


def _free(name: str, taken: Container[str]) -> str:
    """Return `name`, with a number if another text has it: two folders may have one of a name."""
    names = chain([name], (f"{name} ({number})" for number in count(2)))
    return next(each for each in names if each not in taken)


def built_in_corpus() -> Corpus:
    """Return the texts that come with Python and with packages that SGLang installs.

    They depend on the versions of both: the report states their hashes. Raises `SettingsError` if
    there is none.
    """
    sources: dict[str, Callable[[], str]] = {
        "language reference": lambda: language_reference(_SHORTEST_TOPIC),
        "argparse source": lambda: _sources("argparse"),
        "change log": lambda: _file_of("idlelib", "NEWS.txt", "News3.txt"),
        "data set notes": _data_set_notes,
        "typing source": lambda: _sources("typing", "dataclasses", "inspect"),
    }
    texts, absent = {}, []
    for name, source in sources.items():
        try:
            texts[name] = source()
        except (ImportError, OSError):
            absent.append(name)
    if not texts:
        raise SettingsError(
            "corpus: this Python ships none of the built-in texts; give your own with --corpus"
        )
    return Corpus(texts, tuple(absent))


def language_reference(min_characters: int = 0) -> str:
    """Return the topics of Python's language reference that are longer than `min_characters`.

    Every CPython has them (``pydoc_data.topics``, about 110 000 tokens, PSF-2.0).
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(text for _, text in sorted(topics.items()) if len(text) > min_characters)


class Texts(NamedTuple):
    """Texts of one length: token ids of each, and names of where they are from."""

    tokens: list[list[int]]
    sources: tuple[str, ...]


def cut_texts(
    files: Sequence[Path], tokenizer: Tokenizer, *, num_texts: int, num_tokens: int
) -> Texts:
    """Cut texts of `num_tokens` tokens from `files`, or from Python's reference without any.

    Texts are taken evenly over the whole corpus, the same ones each time. Raises `SettingsError` if
    a file cannot be read as UTF-8, or there is no text of that length.
    """
    corpus: dict[str, str] = {}
    for path in files:
        corpus[_free(path.name, corpus)] = read_text(path)
    if not files:
        name = f"pydoc_data.topics of Python {platform.python_version()} (PSF-2.0)"
        corpus = {name: language_reference()}
    pieces: list[list[int]] = []
    for text in corpus.values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces += [ids[i : i + num_tokens] for i in range(0, len(ids), num_tokens)]
    whole = [piece for piece in pieces if len(piece) == num_tokens]
    if not whole:
        longest = max((len(piece) for piece in pieces), default=0)
        raise CalibrationError(
            f"text={', '.join(corpus)}: no text of {num_tokens} tokens (the longest has "
            f"{longest}); give longer files as --text, or fewer --tokens"
        )
    num_texts = min(num_texts, len(whole))
    taken = [whole[i * len(whole) // num_texts] for i in range(num_texts)]
    return Texts(taken, tuple(corpus))


def _sources(*modules: str) -> str:
    return "\n\n".join(_origin(module).read_text(encoding="utf-8") for module in modules)


def _file_of(package: str, *names: str) -> str:
    found = [path for name in names if (path := _origin(package).parent / name).is_file()]
    if not found:
        raise FileNotFoundError(package)
    return found[0].read_text(encoding="utf-8")


def _data_set_notes() -> str:
    notes = sorted((_origin("sklearn").parent / "datasets" / "descr").glob("*.rst"))
    if not notes:
        raise FileNotFoundError("sklearn/datasets/descr")
    return "\n\n".join(path.read_text(encoding="utf-8") for path in notes)


def _origin(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ImportError(module)
    return Path(spec.origin)


def read_text(path: Path, what: str = "corpus") -> str:
    """Return the text of a UTF-8 file; `what` was given as the file.

    Raises `SettingsError` if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"{what} {path}: cannot be read ({error.strerror}); give a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{what} {path}: not UTF-8 text ({error}); convert it, and unpack what is compressed"
        ) from error


def package_source(package: str) -> str:
    """Return the Python files of an installed package, by path, up to `_LONGEST_PACKAGE`.

    Tests are left out, and files of less than 800 characters. Raises `SettingsError` if there is no
    such package, or it has no such file.
    """
    try:
        folder = _origin(package).parent
    except (ImportError, ValueError) as error:
        raise SettingsError(
            f"corpus {PACKAGE_PREFIX}{package}: no such package is installed; give another one, or "
            "a file"
        ) from error
    found, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        if {"tests", "test"} & set(path.relative_to(folder).parts) or size > _LONGEST_PACKAGE:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= _SHORTEST_FILE:
            found.append(text)
            size += len(text)
    if not found:
        raise SettingsError(f"corpus {PACKAGE_PREFIX}{package}: no Python source in it")
    return "\n\n".join(found)[:_LONGEST_PACKAGE]


def _read_json(path: Path) -> dict[str, str]:
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise SettingsError(f"corpus {path}: not valid JSON ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise SettingsError(f"corpus {path}: a JSON object of name to text is required")
    return found
