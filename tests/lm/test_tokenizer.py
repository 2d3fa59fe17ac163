"""Tokenizers of GGUF files and folders, beside llama.cpp, transformers and tokenizers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from language_models import smollm2, smollm2_metadata, write_vocabulary

from lowbit.lm import Tokenizer
from lowbit.lm.pretokenizers import pre_tokenizer
from lowbit.lm.sentencepiece import SentencePiece
from lowbit.lm.tokenizer import _byte_alphabet

TEXTS = [
    "", " ", "   ", " leading", "trailing ", "Hello world 12345", "  a\n\n b\t\tc   \n",
    "\r\n\r\n a\r\nb", "I'm don't WE'LL it's I'D", "x<|im_end|>y<|im_start|>user\nhi",
    "<repo_name>x<file_sep>", "日本語 テスト 한국어 русский язык", "नमस्ते दुनिया ไทย", "a" * 50,
    "emoji 😀👩‍👩‍👧 end 🇩🇪", "naïve café—“quotes” ‘x’ …",
    "def f(x):\n    return x**2  # comment\n\n\n", "1.5e-10, $100,000.00 !!! ???...---",
    "CamelCaseHTTPServer fooBar ÀÉî Straße", "tab\tnew\nline\u00a0nbsp\u2003em",
    "½ ² Ⅷ ٣٤٥ 12 6789", "a\u0301 e\u0301\u0323", "__init__ == != <= >= => -> ::",
]  # fmt: skip
_RANDOM = np.random.default_rng(0)
_PARTS = [*"abc XYZ 0123  \n\t'sdl.,-_(){}é日😀\r\u00a0<|>", "<|im_end|>", "'s", "  ", "\n\n"]
TEXTS += ["".join(_RANDOM.choice(_PARTS, int(n))) for n in _RANDOM.integers(1, 60, 100)]


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata())


def sentence_piece(**changed: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer with the pieces of SmolLM2's that are text."""
    added = {"<start>": 3, "<end_of_turn>": 3, "<|user|>": 3, "\n\n": 4, "    ": 4, "[x y]": 4}
    types = {"<unk>": 2, "<s>": 3, "</s>": 3} | {f"<0x{b:02X}>": 6 for b in range(256)} | added
    other = Tokenizer.from_gguf(smollm2_metadata())
    for id in range(17, other.size):
        text = other.piece(id).decode("utf-8", "replace")
        if "�" not in text and "\n" not in text and "\x00" not in text:
            types.setdefault(text.replace(" ", "▁"), 1)
    found = {
        "model": "llama", "tokens": list(types), "token_type": list(types.values()),
        "scores": [-float(index) for index in range(len(types))], "bos_token_id": 1,
        "eos_token_id": 2, "unknown_token_id": 0, **changed,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def compare_with_llama_cpp(path: Path, metadata: dict[str, Any], texts: list[str]) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    write_vocabulary(path, metadata)
    other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = Tokenizer.from_gguf(metadata)
    for text in texts:
        assert ours.encode(text) == other.tokenize(text.encode(), special=True), text
        bare = other.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text, special=False) == bare, text
    vocabulary = other._model.vocab
    ends = {id for id in range(ours.size) if llama_cpp.llama_vocab_is_eog(vocabulary, id)}
    assert ours.ends == ends


@pytest.mark.parametrize(
    "name",
    ["default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "tekken", "gpt-4o",
     "deepseek-v3", "deepseek-coder", "falcon"],
)  # fmt: skip
def test_every_way_to_cut_text_is_llama_cpps(tmp_path: Path, name: str) -> None:
    # llama.cpp looks for these two at letters alone, the models at marks above them too.
    marks = name in ("tekken", "gpt-4o")
    texts = [text for text in TEXTS if not (marks and ("\u0301" in text or "ि" in text))]
    metadata = {**smollm2_metadata(), "tokenizer.ggml.pre": name}
    compare_with_llama_cpp(tmp_path / "vocabulary.gguf", metadata, texts)


@pytest.mark.parametrize(
    "changed", [{}, {"add_space_prefix": False}, {"add_bos_token": False}], ids=str
)
def test_pieces_with_scores_are_merged_as_in_llama_cpp(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    texts = [*TEXTS, "<start>user\nHi<end_of_turn>\n<s>  b [x y] c\n\n\n d      e", "Of the."]
    compare_with_llama_cpp(tmp_path / "vocabulary.gguf", sentence_piece(**changed), texts)


def test_added_tokens_of_phi_3_take_spaces_with_them() -> None:
    name = {"general.name": "Phi-3 mini"}
    tokenizer = Tokenizer.from_gguf(sentence_piece(add_bos_token=False) | name)
    assert tokenizer.encode("<|user|>\n Hi") == tokenizer.encode("<|user|>Hi")
    assert tokenizer.encode("<s> Hi") != tokenizer.encode("<s>Hi")


def test_smollm_is_what_tokenizers_makes_of_digits_and_bytes(smollm: Tokenizer) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    held = {key.rpartition(".")[2]: value for key, value in smollm2_metadata().items()}
    ids = {token: id for id, token in enumerate(held["tokens"])}
    other = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in held["merges"]]))
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    other.add_special_tokens([AddedToken(token) for token in held["tokens"][:17]])
    for text in TEXTS:
        assert smollm.encode(text) == other.encode(text).ids, text


def merged_pair_by_pair(ids: dict[str, int], scores: list[float], word: str) -> list[int]:
    """The pieces of a word: the best pair merges, of equal ones the leftmost, again and again."""
    pieces = list(word)
    while True:
        pairs = [
            (-scores[ids[left + right]], place)
            for place, (left, right) in enumerate(pairwise(pieces))
            if left + right in ids
        ]
        if not pairs:
            return [ids[piece] for piece in pieces]
        _, place = min(pairs)
        pieces[place : place + 2] = ["".join(pieces[place : place + 2])]


def test_pieces_are_merged_best_first() -> None:
    rng = np.random.default_rng(4)
    for _ in range(30):
        pieces = {"".join(rng.choice([*"abc"], rng.integers(2, 6))) for _ in range(60)}
        ids = {piece: id for id, piece in enumerate(["a", "b", "c", *sorted(pieces)])}
        scores = rng.permutation(len(ids)).tolist()
        model = SentencePiece(ids, scores)
        for length in range(1, 30):
            word = "".join(rng.choice([*"abc"], length))
            assert model.encode(word) == merged_pair_by_pair(ids, scores, word), word


def test_every_byte_has_a_character() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = _byte_alphabet()
    assert set(alphabet) == set(ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


@pytest.mark.deep
def test_text_comes_back(smollm: Tokenizer) -> None:
    pieces = Tokenizer.from_gguf(sentence_piece(add_space_prefix=False))
    prefixed = Tokenizer.from_gguf(sentence_piece())
    assert prefixed.decode(prefixed.encode("Hello  world")) == "Hello  world"
    for text in TEXTS:
        assert smollm.decode(smollm.encode(text), special=True) == text
        assert pieces.decode(pieces.encode(text, special=False), special=True) == text
    ids = smollm.encode("<|im_start|>a<|im_end|>")
    assert smollm.decode(ids) == "a"
    assert smollm.decode([*ids, smollm.size + 3]) == "a"
    with pytest.raises(ValueError, match="-1"):
        smollm.decode([-1])


@pytest.mark.deep
def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path, smollm: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    path = smollm2()
    other = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    other.save_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos, ours.eos, ours.ends, ours.size) == (1, 2, smollm.ends, smollm.size)
    ids = np.random.default_rng(0).integers(0, ours.size, (20, 40)).tolist()
    for some in [*map(ours.encode, TEXTS), *ids]:
        assert ours.decode(some) == other.decode(some, skip_special_tokens=True)
        assert ours.decode(some, special=True) == other.decode(some)
    for text in TEXTS:
        assert ours.encode(text) == other.encode(text)
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    for messages in (conversation, [{"role": "system", "content": "Be brief."}, *conversation]):
        for add in (True, False):
            expected = other.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add
            )
            for tokenizer in (ours, smollm):
                assert tokenizer.chat(messages, add_generation_prompt=add) == expected


def test_a_folder_with_pieces(tmp_path: Path) -> None:
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Fast

    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for piece in ("▁", "H", "i", "▁H", "▁Hi"):
        ids[piece] = len(ids)
    merges = [("▁", "H"), ("▁H", "i")]
    fast = Fast(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    space = normalizers.Replace(" ", "▁")
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    strip = decoders.Strip(" ", 1, 0)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast.enable_truncation(3)
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>",
              "chat_template": [{"name": "default", "template": "{{ bos_token }}"}]}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 259]}')
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos, ours.eos, ours.ends) == (1, 2, {2, 259})
    encoded = ours.encode("Hi Hi é")
    assert encoded == [1, 263, 263, 259, 0xC3 + 3, 0xA9 + 3]
    assert ours.decode(encoded) == "Hi Hi é"
    assert ours.encode("Hi", special=False) == [263]
    assert ours.chat([]) == "<s>"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert Tokenizer.from_folder(tmp_path).chat([]) == "</s>"


def test_characters_come_when_all_their_bytes_are_there(smollm: Tokenizer) -> None:
    ids = smollm.encode("a👩‍👩‍👧日!")
    stream = smollm.stream()
    pieces = [stream.add(id) for id in ids]
    assert "".join(pieces) == "a👩‍👩‍👧日!"
    assert "" in pieces
    assert stream.rest() == ""
    stream = smollm.stream()
    assert stream.add(smollm.encode("😀")[0]) == ""
    assert stream.rest() == "�"
    for row in np.random.default_rng(1).integers(0, smollm.size, (20, 30)).tolist():
        stream = smollm.stream()
        assert "".join(map(stream.add, row)) + stream.rest() == smollm.decode(row)


GGUF = "tokenizer.ggml."
FEW = {"token_type": [1, 1], "merges": ["a b"], "bos_token_id": 0, "eos_token_id": 0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "bert"}, "model is 'bert'; known are gpt2 and llama"),
        ({"model": None}, "model is None"),
        ({"pre": "klingon"}, "pre is 'klingon', which is not known; known are .*qwen2"),
        ({"tokens": None}, "tokens must be a list"),
        ({"tokens": "abc"}, "tokens must be a list"),
        ({"tokens": [3]}, r"tokens\[0\] is 3, not text"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "tokens has 'a' twice"),
        ({"token_type": [1, 2]}, "token_type must be a list of 49,152 elements"),
        ({"merges": None}, "merges must be a list"),
        ({"merges": ["ab"]}, r"merges\[0\] is .*'ab'.*, not a pair"),
        ({"merges": ["a nowhere"]}, r"merges\[0\] is .*nowhere.*, not a pair"),
        ({"tokens": ["a", "ab"], **FEW}, "merges: .*`b`"),
        # What is longer than all tokens once made the Rust code panic.
        ({"tokens": ["a", "b"], **FEW}, r"merges\[0\]"),
        ({"bos_token_id": 49152}, "bos_token_id is 49152; there are 49,152 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eos_token_id": [1]}, r"eos_token_id is \[1\]"),
        ({"eot_token_id": float("inf")}, "eot_token_id is inf"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is set"),
        ({"model": "llama", "scores": [0.0]}, "scores must be a list of 49,152 elements"),
    ],
)
def test_damaged_metadata_is_told(changed: dict[str, Any], message: str) -> None:
    metadata = smollm2_metadata() | {GGUF + key: value for key, value in changed.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(kept)


def test_damaged_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is not there"):
        Tokenizer.from_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    for text, message in (
        ("{", r"tokenizer\.json: "),
        ('{"model": 3}', r"tokenizer\.json: "),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            Tokenizer.from_folder(tmp_path)
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models

    Fast(models.BPE()).save(str(file))
    with pytest.raises(ValueError, match="its decoder is null"):
        Tokenizer.from_folder(tmp_path)
    fast = Fast(models.WordPiece({"a": 0}))
    fast.decoder = decoders.WordPiece()
    fast.save(str(file))
    with pytest.raises(ValueError, match=r'decoder is .*"WordPiece"'):
        Tokenizer.from_folder(tmp_path)


def test_empty_tokens_and_words_that_are_tokens() -> None:
    metadata = smollm2_metadata()
    tokens = list(metadata[GGUF + "tokens"])
    tokens[-1] = ""
    assert Tokenizer.from_gguf(metadata | {GGUF + "tokens": tokens, GGUF + "merges": ["Ġ t"]})
    assert pre_tokenizer("llama-bpe").ignore_merges
    assert not pre_tokenizer("smollm").ignore_merges


def test_text_that_is_no_unicode_is_encoded(smollm: Tokenizer) -> None:
    for tokenizer in (smollm, Tokenizer.from_gguf(sentence_piece())):
        assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a?b"
