"""Text to token ids and back, as a GGUF file or a Hugging Face folder says."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from lowbit.lm import chat
from lowbit.lm.keys import TOKENIZER, Keys, refuse, unknown
from lowbit.lm.naming import naming
from lowbit.lm.pretokenizers import pre_tokenizer
from lowbit.lm.sentencepiece import SPACE, SentencePiece
from lowbit.registry.extras import require

# Of GGUF's types of tokens. The first two are control tokens, which have no text.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Tokens that end a text whatever the file says, those of llama.cpp: of turns, of texts, and of
# files in a model of code.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>", "_<EOT>", "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
GGUF_TOKENIZER = "tokenizer_gguf.json"
"""In folders that were made of GGUF files: the keys of these."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True, repr=False, eq=False)
class Tokenizer:
    """Turns text into token ids and back. Several threads may use it at once.

    size: how many tokens there are. bos, eos: the tokens that begin and end a text, or None. ends:
    those after which a model has nothing more to say. template: of conversations, or None.
    """

    to_ids: Callable[[str, bool], list[int]]
    """`encode`."""
    token: Callable[[int], str | None]
    """A token as the vocabulary has it: `byte_level`, in GPT-2's characters for bytes, else in
    SentencePiece's."""
    added: Mapping[int, tuple[str, bool]]
    """The text of tokens that stand for themselves, and whether they are control tokens."""
    size: int
    byte_level: bool
    space_prefix: bool
    """Whether a text gets a space in front, which `decode` takes off."""
    ends: frozenset[int]
    bos: int | None
    eos: int | None
    template: str | None

    @classmethod
    def of(cls, model: str | os.PathLike[str], metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a model's folder, or of its GGUF file with these metadata. Errors name
        the file."""
        with naming(model):
            if os.path.isdir(model):
                return cls.from_folder(Path(model))
            return cls.from_gguf(metadata)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a GGUF file, from the values of its keys by their names.

        ValueError: a key is missing or damaged, or names a tokenizer that is not known.
        NotImplementedError: there are keys of tokenizers that nothing reads.
        ModuleNotFoundError: byte-level tokenizers need the package tokenizers.
        """
        return _from_gguf(_Gguf(metadata))

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: tokenizer.json, and if they are there
        tokenizer_config.json, chat_template.jinja, generation_config.json; or of what
        `lowbit quantize --weights kept` made of a GGUF file.

        FileNotFoundError: there is no tokenizer.json. ValueError: a file is damaged, or its tokens
        are neither bytes nor SentencePiece's. ModuleNotFoundError: the package tokenizers is
        needed.
        """
        if keys := _json(Path(path) / GGUF_TOKENIZER):
            return cls.from_gguf(keys)
        return _from_folder(Path(path))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; added tokens are found in it. special: with the token that begins
        texts, where the model wants it; a conversation's template writes it itself."""
        whole = text.encode("utf-8", "replace").decode()  # a terminal gives bytes as surrogates
        return self.to_ids(whole, special)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. special: with control tokens.
        ValueError: an id is negative."""
        text = b"".join(self.piece(id, special) for id in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.space_prefix else text

    def stream(self) -> TextStream:
        """What gives the text of ids that come one by one."""
        return TextStream(self)

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation, up to where the model is to answer.

        variables: what else the template may ask for, such as tools, or
        add_generation_prompt=False for a conversation that is complete. ValueError: the model has
        no chat template, or it raises an error, with its message.
        """
        if self.template is None:
            raise ValueError("the model has no chat template; give it a text to go on with instead")
        bos, eos = (
            "" if id is None else self.piece(id, True).decode() for id in (self.bos, self.eos)
        )
        known = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        known["add_generation_prompt"] = True
        return chat.render(self.template, messages, **{**known, **variables})

    def piece(self, id: int, special: bool = False) -> bytes:
        """The bytes of a token; none of one behind the last, which only the model has."""
        if id < 0:
            raise ValueError(f"a token's id is {id}; it must be at least 0")
        if id in self.added:
            text, control = self.added[id]
            return text.encode() if special or not control else b""
        token = (self.token(id) if id < self.size else None) or ""
        alphabet = _byte_alphabet()
        if self.byte_level and alphabet.keys() >= set(token):
            return bytes(alphabet[character] for character in token)
        byte = _BYTE.fullmatch(token)
        return bytes((int(byte[1], 16),)) if byte else token.replace(SPACE, " ").encode()


class TextStream:
    """The text of token ids as they come: a character is given when all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._piece = tokenizer.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id: int) -> str:
        """What is certain of the text with this token and was not given before."""
        return self._decoder.decode(self._piece(id))

    def rest(self) -> str:
        """U+FFFD, if the last character lacks bytes and nothing will follow."""
        return self._decoder.decode(b"", True)


@lru_cache(maxsize=1)
def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, those from U+0100 on for
    the others."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _ends(id_of: Callable[[str], int | None], *known: int | None) -> frozenset[int]:
    return frozenset(id for id in (*known, *map(id_of, _ENDS)) if id is not None)


class _Gguf:
    """The keys of a GGUF file that concern its tokenizer, checked as they are read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata = Keys(metadata)
        self.tokens: list[str] = []  # `values` asks how many
        tokens = self.values("tokens")
        if set(map(type, tokens)) != {str}:
            wrong = next(id for id, token in enumerate(tokens) if type(token) is not str)
            raise ValueError(f"tokenizer.ggml.tokens[{wrong}] is {tokens[wrong]!r}, not text")
        self.tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(self.ids) < len(self.tokens):
            twice = next(token for id, token in enumerate(self.tokens) if self.ids[token] > id)
            raise ValueError(f"tokenizer.ggml.tokens has {twice!r} twice")
        types = self.values("token_type") if "tokenizer.ggml.token_type" in metadata else ()
        self.added = {
            id: (self.tokens[id], type != _USER_DEFINED)
            for id, type in enumerate(types[: len(self.tokens)])
            if type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def values(self, key: str, least: int = 0) -> Sequence[Any]:
        """ValueError: it is missing, or shorter than that or than the tokens."""
        held, least = self.get(key), least or len(self.tokens) or 1
        if held is None or isinstance(held, str | bytes | int | float) or len(held) < least:
            raise ValueError(f"tokenizer.ggml.{key} must be a list of {least:,} elements, or more")
        return held

    def id(self, key: str) -> int | None:
        """ValueError: there is no such token."""
        id = self.get(key)
        if id is not None and (type(id) is not int or not 0 <= id < len(self.tokens)):
            raise ValueError(f"tokenizer.ggml.{key} is {id}; there are {len(self.tokens):,} tokens")
        return id

    def merges(self) -> list[Any]:
        """Pairs of tokens, the first to merge first. ValueError: one is no pair, or no token."""
        held = self.values("merges", least=1)
        merges = [merge.partition(" ")[::2] for merge in map(str, held)]
        bad = (id for id, (a, b) in enumerate(merges) if not (a and b and a + b in self.ids))
        if (wrong := next(bad, None)) is not None:
            raise ValueError(f"tokenizer.ggml.merges[{wrong}] is {held[wrong]!r}, not a pair")
        return merges

    def begin(self, default: bool) -> list[int]:
        """What every text begins with. ValueError: there is to be a token, and is not."""
        if not self.get("add_bos_token", default):
            return []
        bos = self.id("bos_token_id")
        if bos is None:
            raise ValueError("tokenizer.ggml.add_bos_token is set, bos_token_id is missing")
        return [bos]


def _from_gguf(file: _Gguf) -> Tokenizer:
    kind = file.get("model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; known are gpt2 and llama")
    byte_level, eos = kind == "gpt2", file.id("eos_token_id")
    tokenizer = Tokenizer(
        to_ids=_byte_level(file) if byte_level else _sentence_piece(file),
        token=file.tokens.__getitem__,
        added=file.added,
        size=len(file.tokens),
        byte_level=byte_level,
        space_prefix=not byte_level and bool(file.get("add_space_prefix", True)),
        ends=_ends(file.ids.get, eos, file.id("eot_token_id"), file.id("eom_token_id")),
        bos=file.id("bos_token_id"),
        eos=eos,
        template=file.metadata.get("tokenizer.chat_template"),
    )
    unread = {
        key.removeprefix("tokenizer."): value
        for key, value in file.metadata.unread().items()
        if key.startswith("tokenizer.")
    }
    refuse("the tokenizer", unknown(unread, TOKENIZER))
    return tokenizer


def _byte_level(file: _Gguf) -> Callable[[str, bool], list[int]]:
    require("a byte-level tokenizer", "lm", "tokenizers")
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    known, merges = pre_tokenizer(str(file.get("pre", "default"))), file.merges()
    try:
        fast = Tokenizer(models.BPE(file.ids, merges, ignore_merges=known.ignore_merges))
    except Exception as error:  # what it raises is Exception itself
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in known.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    texts = (text for text, _ in file.added.values())
    fast.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    begin = file.begin(known.add_bos)
    return lambda text, special: [*begin * bool(special), *fast.encode(text).ids]


def _sentence_piece(file: _Gguf) -> Callable[[str, bool], list[int]]:
    scores = [float(score) for score in file.values("scores")]
    model = SentencePiece(file.ids, scores, file.id("unknown_token_id"))
    texts, begin = {text for text, _ in file.added.values()}, file.begin(True)
    added, space = _any_of(texts), " " if file.get("add_space_prefix", True) else ""
    # GGUF does not say that Phi-3's added tokens take the spaces behind them with them.
    name = str(file.metadata.get("general.name", "")).lower()
    phi = "phi-3" in name or "phi3" in name
    strips = texts - {"<unk>", "<s>", "<|endoftext|>"} if phi else set()

    def to_ids(text: str, special: bool) -> list[int]:
        ids, last = begin * bool(special), ""
        for index, part in enumerate(added.split(text)):  # every second is an added token
            if index % 2:
                ids.append(file.ids[part])
                last = part
            elif part := part.lstrip() if last in strips else part:
                ids += model.encode(space + part)
        return ids

    return to_ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """An expression for the longest of some texts, by their first characters: there may be
    thousands."""
    found: list[str] = []
    for first, of in groupby(sorted(texts), key=lambda text: text[0]):
        longest_first = sorted((re.escape(text[1:]) for text in of), key=len, reverse=True)
        found.append(f"{re.escape(first)}(?:{'|'.join(longest_first)})")
    return re.compile(f"({'|'.join(found) or '(?!)'})")


def _from_folder(folder: Path) -> Tokenizer:
    require("tokenizer.json", "lm", "tokenizers")
    from tokenizers import Tokenizer as Fast

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; save_pretrained of transformers writes it")
    try:
        fast = Fast.from_file(str(path))
    except Exception as error:  # what it raises is Exception itself
        raise ValueError(f"{path}: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    decoder = fast.decoder.__getstate__().decode() if fast.decoder else "null"
    if not any(f'"{known}"' in decoder for known in ("ByteLevel", "ByteFallback", "Metaspace")):
        raise ValueError(f"{path}: its decoder is {decoder}, whose tokens are not known")
    config = _json(folder / "tokenizer_config.json")
    names = (config.get("bos_token"), config.get("eos_token"))  # texts, or objects with texts
    texts = (name.get("content") if isinstance(name, dict) else name for name in names)
    bos, eos = (fast.token_to_id(text) if isinstance(text, str) else None for text in texts)
    ends = _json(folder / "generation_config.json").get("eos_token_id")
    added = fast.get_added_tokens_decoder()
    return Tokenizer(
        to_ids=lambda text, special: fast.encode(text, add_special_tokens=special).ids,
        token=fast.id_to_token,
        added={id: (token.content, token.special) for id, token in added.items()},
        size=fast.get_vocab_size(),
        byte_level='"ByteLevel"' in decoder,
        space_prefix=any(f'"{known}"' in decoder for known in ("Strip", "always", "first")),
        ends=_ends(fast.token_to_id, eos, *(ends if isinstance(ends, list) else [ends])),
        bos=bos,
        eos=eos,
        template=_template(folder, config),
    )


def _json(path: Path) -> dict[str, Any]:
    """What a file holds; nothing, if it is not there. ValueError: that is no object."""
    try:
        held = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path} must hold an object")
    return held


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    held = config.get("chat_template")
    if isinstance(held, list):  # of several, by name
        held = {one.get("name"): one.get("template") for one in held}.get("default")
    return held
