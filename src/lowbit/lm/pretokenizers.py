"""How byte-level tokenizers cut text into words before they merge: a regular expression or several,
by the name that a GGUF file gives (`tokenizer.ggml.pre`).

Each expression cuts what the one before it left: a match is a word, and so is what lies between two
matches. The expressions are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_DIGITS = r"\p{N}{1,3}"


def _tiktoken(digits: str, letters: str = r"\p{L}", signs: str = r"[^\s\p{L}\p{N}]") -> str:
    """Contractions in any case, letters with a sign in front, digits, signs with line ends."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return rf"(?i:{_CONTRACTIONS})|{word}|{digits}| ?{signs}+[\r\n]*|{_SPACES}"


def _cased(digits: str, contractions: str) -> str:
    """Words that are also cut where a lower case letter meets a capital."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = "|".join(
        f"{first}{word}{contractions}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*")
    )
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = _tiktoken(_DIGITS)
_QWEN2 = _tiktoken(_DIGIT)
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """What is known of a tokenizer by its name.

    patterns: regular expressions, of which each cuts what the one before it left.
    ignore_merges: a word that is a token is not merged anew.
    add_bos: a text begins with the token that begins texts, where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_BY_NAMES = {
    "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum "
    "modern-bert": PreTokenizer((_GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2":
        PreTokenizer((_DIGIT, _GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2":
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe chatglm-bpe glm4": PreTokenizer((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open kormo grok-2":
        PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_tiktoken(_DIGIT, r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]"),)),
    "tekken": PreTokenizer((_cased(_DIGIT, ""),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((_cased(_DIGITS, f"(?i:{_CONTRACTIONS})?"),)),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer((_DIGITS, "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}  # fmt: skip
_KNOWN = {name: one for names, one in _BY_NAMES.items() for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that is called so. ValueError: it is not known, with those that are."""
    if name not in _KNOWN:
        known = ", ".join(sorted(_KNOWN))
        raise ValueError(f"tokenizer.ggml.pre is {name!r}, which is not known; known are {known}")
    return _KNOWN[name]
