"""Data with labels, as arrays: NumPy, and PIL for photographs."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowbit.registry.extras import folder_of, require

if TYPE_CHECKING:
    from PIL.Image import Image  # pyright: ignore[reportMissingImports]

# Files whose types their names tell: those of the Python installation, and of a folder.

FILE_SIZE = 1024  # bytes of a file's beginning, and of its end
FILE_BLOCK = 4096  # bytes of each in which white space is passed over
FILE_PADDING = 256
FEWEST_BYTES = 8  # bytes; with less than that magika does not ask its network
FILES_OF_A_TYPE = 150  # files of one type at most

FILE_TYPES = {
    ".py": "python", ".pyc": "pythonbytecode", ".md": "markdown", ".rst": "rst",
    ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".c": "c",
    ".cpp": "cpp", ".so": "elf", ".sh": "shell", ".html": "html", ".css": "css", ".svg": "svg",
    ".xml": "xml", ".png": "png", ".gif": "gif", ".gz": "gzip", ".zip": "zip", ".whl": "zip",
    ".npy": "npy", ".npz": "npz", ".ttf": "ttf", ".js": "javascript", ".jpg": "jpeg",
    ".pem": "pem", ".csv": "csv", ".ini": "ini", ".f90": "fortran", ".tcl": "tcl", ".exe": "pebin",
}  # fmt: skip
"""By suffix, what magika calls the type. Not .txt and .h, which are of several types."""


def typed_files(*folders: Path) -> list[tuple[Path, str]]:
    """Files below the folders with their types, in a random order that is always the same; at most
    150 of each type, so that Python's own sources are not nearly all."""
    by_type: dict[str, list[Path]] = {}
    for path in itertools.chain.from_iterable(map(_regular, folders)):
        by_type.setdefault(FILE_TYPES[path.suffix], []).append(path)
    random = np.random.default_rng(0)
    found = [
        (paths[i], label)
        for label, paths in sorted(by_type.items())
        for i in random.permutation(len(paths))[:FILES_OF_A_TYPE]
    ]
    return [found[i] for i in random.permutation(len(found))]


def installation() -> tuple[Path, ...]:
    """Where Python's standard library and the packages beside it are."""
    paths = sysconfig.get_paths()
    return tuple(Path(path) for path in dict.fromkeys((paths["stdlib"], paths["purelib"])))


def _regular(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in FILE_TYPES and path.is_file() and path.stat().st_size >= FEWEST_BYTES:
            yield path


def features(path: Path) -> npt.NDArray[np.int32]:
    """What magika's network reads of a file: int32 [2048], bytes of its beginning and its end
    without white space before and behind; 256 where it is shorter."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        begin = file.read(FILE_BLOCK).lstrip()[:FILE_SIZE]
        file.seek(max(0, size - FILE_BLOCK))
        end = file.read(FILE_BLOCK).rstrip()[-FILE_SIZE:]
    both = np.full(2 * FILE_SIZE, FILE_PADDING, np.int32)
    both[: len(begin)] = np.frombuffer(begin, np.uint8)
    both[2 * FILE_SIZE - len(end) :] = np.frombuffer(end, np.uint8)
    return both


# Photographs with labels: ImageNet's folders, and the 20 that the package foolbox brings.
#
# Decoding needs PIL.

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

SUFFIXES = {".jpeg", ".jpg", ".png"}
SAMPLES = 20


@dataclass(frozen=True)
class Preprocessing:
    """The shorter side resized to `resize` pixels, `size` × `size` cut out of the middle,
    (pixel / 255 − mean) / deviation. The defaults are torchvision's for ImageNet."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    deviation: tuple[float, ...] = (0.229, 0.224, 0.225)
    resize: int = 256
    size: int = 224
    bicubic: bool = False

    def middle(self, image: Image) -> Floats:
        """float32 [3, size, size]."""
        shorter = min(image.size)
        width, height = (side * self.resize // shorter for side in image.size)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        resized = image.convert("RGB").resize((width, height), self._filter())
        return self._normalized(resized.crop((left, top, left + self.size, top + self.size)))

    def part(self, image: Image, box: tuple[float, float, float, float]) -> Floats:
        """A part (left, top, right, bottom) of an image as float32 [3, size, size]."""
        sides = (self.size, self.size)
        return self._normalized(image.convert("RGB").resize(sides, self._filter(), box=box))

    def _filter(self) -> Any:
        from PIL.Image import Resampling  # pyright: ignore[reportMissingImports]

        return Resampling.BICUBIC if self.bicubic else Resampling.BILINEAR

    def _normalized(self, image: Image) -> Floats:
        mean, deviation = (np.array(one, np.float32) for one in (self.mean, self.deviation))
        normal: Floats = (np.asarray(image, np.float32) / np.float32(255) - mean) / deviation
        return np.ascontiguousarray(normal.transpose(2, 0, 1))


class ImageFolder:
    """Images in one folder a class; the classes are numbered in the order of the folders' names,
    as ImageNet's are."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """FileNotFoundError if there is no such folder, ValueError if it has no class or image."""
        require("reading images", "models", "PIL")
        root = Path(folder)
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {os.fspath(folder)!r}")
        self.folder = root
        self.classes = sorted(path.name for path in root.iterdir() if path.is_dir())
        found = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted(root.joinpath(name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not found:
            raise ValueError(
                f"{root} has no images; expected a folder for each class, with files that end in "
                f"{', '.join(sorted(SUFFIXES))}"
            )
        self.paths = [path for path, _ in found]
        self.labels: Labels = np.array([label for _, label in found])

    def batches(
        self, preprocessing: Preprocessing, batch: int, limit: int | None = None
    ) -> Iterator[tuple[Floats, Labels]]:
        """Images [batch, 3, size, size] and labels; of `limit` images, the same random ones always.

        ValueError, naming the file, for one that is no image.
        """
        order = np.random.default_rng(0).permutation(len(self.paths))[:limit]
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            images = [preprocessing.middle(opened(self.paths[i])) for i in chosen]
            yield np.stack(images), self.labels[chosen]


def opened(path: Path) -> Image:
    """An image, decoded. ValueError if it cannot be."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    try:
        with Image.open(path) as image:
            image.load()
            return image
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from None


def samples() -> list[tuple[Image, int]]:
    """foolbox's 20 photographs of 512 × 512 pixels and their ImageNet classes; of that package
    nothing but the files is used. ModuleNotFoundError if it, or PIL, is not installed."""
    require("the photographs", "models", "PIL")
    folder = folder_of("the photographs", "foolbox") / "data"
    # imagenet_07_609.jpg: number, class.
    paths = sorted(folder.glob("imagenet_*.jpg"))
    return [(opened(path), int(path.stem.rpartition("_")[2])) for path in paths]


def boxes(image: Image, count: int, seed: int) -> Iterator[tuple[float, float, float, float]]:
    """Random squares of an image, with sides of 0.6 to 1 of its shorter one."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        side = min(image.size) * random.uniform(0.6, 1)
        left, top = (random.uniform(0, length - side) for length in image.size)
        yield left, top, left + side, top + side


# Words whose sentiment ten people rated: the lexicon in the package vaderSentiment
# (Hutto & Gilbert 2014).


def rated_words() -> tuple[list[str], npt.NDArray[np.float64]]:
    """The lexicon's words of letters, and their mean ratings from −4 to 4, in a random order that
    is always the same. ModuleNotFoundError if the package is not installed."""
    path = folder_of("the rated words", "vaderSentiment") / "vader_lexicon.txt"
    # word, mean, deviation, list of ratings.
    rows = [line.split("\t") for line in path.read_text("utf-8").splitlines() if line]
    found = {row[0]: float(row[1]) for row in rows if row[0].isalpha() and row[0].isascii()}
    words = sorted(found)
    order = np.random.default_rng(0).permutation(len(words))
    return [words[i] for i in order], np.array([found[words[i]] for i in order])


# Real sentences that are on every machine: the prose of Python's own manual.
#
# CPython ships the texts of its `help()` topics as `pydoc_data.topics`. They are written by
# people, for people, and come with the interpreter, so nothing has to be downloaded.

FEWEST_WORDS, MOST_WORDS = 5, 40

# The end of a sentence: a full stop after a word, then something that can begin the next.
_BOUNDARY = re.compile(r'(?<=[a-z0-9)"*]\.)\s+(?=[A-Z"(])')
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|cf|vs|resp)\.$")
# Grammar, code, tables, headings and list items are not prose.
_NOT_PROSE = re.compile(r"::|\[\d|[|{}<>=_\\`~^]|--|\.\.\.|\*\*")


def manual_sentences(count: int) -> list[str]:
    """`count` different English sentences from Python's manual, spread evenly over it.

    The same ones on every run of one Python version. RuntimeError if this Python lacks the
    texts, ValueError if they hold fewer sentences than that.
    """
    found = list(dict.fromkeys(extract(_topics())))
    if not 0 < count <= len(found):
        raise ValueError(f"expected 1 to {len(found)} sentences, got {count}")
    return [found[index * len(found) // count] for index in range(count)]


def manual() -> str:
    """Python's manual as one text. RuntimeError if this Python lacks it."""
    return "\n\n".join(_topics())


def _topics() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python came without pydoc_data.topics, the manual that the text is from; "
            "install your system's full python3 package"
        ) from error
    return [topics[name] for name in sorted(topics)]


def extract(texts: Iterable[str]) -> Iterator[str]:
    """The whole sentences of 5 to 40 words in the flowing paragraphs of `texts`, in order."""
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            lines = paragraph.splitlines()
            if any(line.startswith((" ", "\t")) for line in lines) or not lines:
                continue  # indented: code, a table, or a list
            for sentence in _split(re.sub(r"(?<=\w)-\n", "-", paragraph)):
                if _is_whole(sentence):
                    yield sentence


def _split(paragraph: str) -> Iterator[str]:
    begin = ""
    for piece in _BOUNDARY.split(re.sub(r"\s+", " ", paragraph.strip())):
        begin = f"{begin} {piece}".strip()
        if not _ABBREVIATION.search(begin):
            yield begin
            begin = ""
    if begin:
        yield begin


def _is_whole(sentence: str) -> bool:
    if not (sentence[0].isupper() and sentence.endswith(".")) or _NOT_PROSE.search(sentence):
        return False
    if sentence.count("(") != sentence.count(")") or sentence.count('"') % 2:
        return False
    letters = sum(character.isalpha() or character == " " for character in sentence)
    words = len(sentence.split())
    return FEWEST_WORDS <= words <= MOST_WORDS and letters >= 0.9 * len(sentence)


Array = npt.NDArray[np.float32]

TONE_RATE = 16_000  # samples a second
LOWEST_TONE, HIGHEST_TONE = 65.0, 1500.0  # Hz, evenly spread in octaves
HARMONICS = 12


def tones(count: int, samples: int, seed: int) -> tuple[Array, npt.NDArray[np.float64]]:
    """Frames [count, samples] of zero mean and unit variance, and their pitches [count] in Hz.

    Each is a sum of harmonics with random phases, that fall off by a random slope, and white noise
    from 5 dB above them to 20 dB below.
    """
    random = np.random.default_rng(seed)
    pitch = LOWEST_TONE * (HIGHEST_TONE / LOWEST_TONE) ** random.random(count)
    number = np.arange(1, HARMONICS + 1)
    partial = pitch[:, None] * number  # Hz
    strength = number ** -random.uniform(0.5, 2.0, (count, 1)) * (partial < TONE_RATE / 2)
    phase = random.uniform(0, 2 * np.pi, partial.shape)
    angle = 2 * np.pi * partial[:, :, None] * (np.arange(samples) / TONE_RATE) + phase[:, :, None]
    sound = np.einsum("ch,chs->cs", strength, np.sin(angle))
    sound /= sound.std(1, keepdims=True)
    level = 10 ** (random.uniform(-20, 5, (count, 1)) / 20)
    sound += level * random.standard_normal(sound.shape)
    sound -= sound.mean(1, keepdims=True)
    return (sound / sound.std(1, keepdims=True)).astype(np.float32), pitch
