"""The command `lowbit generate`: texts of prompts, or a conversation."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from lowbit.cli.application import JsonFile, Threads, command, opened
from lowbit.registry.printable import without_steering

if TYPE_CHECKING:
    from lowbit.lm import LanguageModel, Stream

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, or a folder of Hugging Face's or lowbit's.",
        show_default=False,
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What the model is told before all else.")
]
MaxTokens = Annotated[int, typer.Option(help="The most tokens of a text.")]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token; the higher, the more varied.")
]
TopK = Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0: from all.")]
TopP = Annotated[
    float, typer.Option(help="Draw from the likeliest tokens that have this probability together.")
]
MinP = Annotated[
    float,
    typer.Option(help="Draw from tokens with this share of the likeliest's probability."),
]
RepeatPenalty = Annotated[
    float, typer.Option(help="Above 1, the last 64 tokens become less likely.")
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed draws the same text.")]
Cache = Annotated[
    str, typer.Option(help="How keys and values are kept: bfloat16, float32 or int8.")
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda or cuda:N.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="A string that ends the text; give it again for another."),
]
Sequences = Annotated[
    int, typer.Option(metavar="N", min=1, help="How many of several prompts run at once.")
]
Speculate = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=7,
        help="Guess so many tokens at once where the last ones came before; 0: none.",
    ),
]  # fmt: skip


@command("generate", example="generate model.gguf 'Name three colours.' --max-tokens 64")
def generate(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT...",
            help="What the user says; -: read from stdin. Several are answered "
            "together, each by itself.",
            show_default="a conversation, a line at a time",
        ),
    ] = None,
    system: System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with the text itself, without a chat template.")
    ] = False,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repeat_penalty: RepeatPenalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    cache: Cache = "bfloat16",
    device: Device = "cpu",
    speculate: Speculate = 0,
    sequences: Sequences = 32,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Let a language model answer, or go on with a text.

    The text comes on stdout while it is made, tokens per second on stderr at its end. Ctrl-C ends
    it where it is. Texts of several prompts come in their order, with an empty line between them;
    tokens are not guessed there. Without a prompt it is a conversation: Ctrl-D ends that, or Ctrl-C
    where the model waits; where it is longer than the context, what was said first is left out.
    """
    from lowbit.lm import LanguageModel, Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, repeat_penalty, seed)
    options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": sampling, "stop": stop or ()}
    place: dict[str, Any] = {"threads": threads, "cache": cache, "device": device}
    if not prompts:
        if raw or json_file is not None:
            raise ValueError("--raw and --json need a prompt")
        _conversation(LanguageModel.load(model, **place), system, speculate, options)
        return
    if raw and system is not None:
        raise ValueError("--raw takes a text as it is; it has no place for --system")
    said = [_said(sys.stdin.read() if prompt == "-" else prompt, system) for prompt in prompts]
    with opened(json_file) as file:
        lm = LanguageModel.load(model, sequences=min(sequences, len(said)), **place)
        _answered(lm, said, speculate, {**options, "raw": raw}, file, json_file != "-")


def _answered(
    lm: LanguageModel, said: Sequence[Any], speculate: int, options: dict[str, Any],
    file: TextIO | None, shown: bool,
) -> None:  # fmt: skip
    """Answer prompts, print the texts if they are to be shown, and write them to a file."""
    if len(said) == 1:
        streams = [lm.generate(said[0], speculate=speculate, **options)]
    else:
        streams = lm.generate_many(said, **options)
    begin = perf_counter()
    texts, finished = _all_shown(streams, shown)
    seconds = perf_counter() - begin
    if file is not None:
        found = [{"text": text, **one.figures()} for text, one in zip(texts, streams)]  # noqa: B905
        file.write(json.dumps(found if len(said) > 1 else found[0], indent=1) + "\n")
    _print_total(streams, seconds)
    if not finished:
        raise typer.Exit(130)  # as shells tell of SIGINT


def _conversation(
    lm: LanguageModel, system: str | None, speculate: int, options: dict[str, Any]
) -> None:
    """Ask and answer, a line at a time, until the input ends."""
    with suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited)
    messages = [] if system is None else [_message("system", system)]
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if not said.strip():
            continue
        asked = [*messages, _message("user", said)]
        messages = _fitting(lm, asked, options["max_tokens"])
        if not messages or messages[-1]["role"] != "user":
            continue
        stream = lm.generate(messages, speculate=speculate, **options)
        messages.append(_message("assistant", _shown(stream)[0]))
        _print_speeds(stream)


def _fitting(
    lm: LanguageModel, messages: list[dict[str, str]], max_tokens: int
) -> list[dict[str, str]]:
    """The conversation without the oldest questions and answers, so that an answer fits behind it,
    or half a context of one. What the system says stays, and the last message, unless that alone is
    too long."""
    from lowbit.lm.generation import prompt_ids

    first, kept = int(messages[0]["role"] == "system"), [*messages]
    most = lm.context - min(max_tokens, lm.context // 2)
    while (count := len(prompt_ids(lm.tokenizer, kept))) > most and len(kept) > first + 1:
        del kept[first : first + 2]
    if count > lm.context:
        print(f"{count:,} tokens do not fit the context of {lm.context:,}", file=sys.stderr)
        return messages[:-1]
    if gone := (len(messages) - len(kept)) // 2:
        print(f"the context is full: without the {gone} oldest of what was said", file=sys.stderr)
    return kept


def _said(text: str, system: str | None) -> str | list[dict[str, str]]:
    return text if system is None else [_message("system", system), _message("user", text)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _shown(stream: Stream, shown: bool = True) -> tuple[str, bool]:
    """The text, printed as it comes, and whether nobody interrupted it."""
    pieces: list[str] = []
    finished = False
    with suppress(KeyboardInterrupt):
        for piece in stream:
            pieces.append(piece)
            if shown:
                print(_for_terminal(piece), end="", flush=True)
        finished = True
    stream.close()
    if shown:
        print(flush=True)
    return "".join(pieces), finished


def _for_terminal(piece: str) -> str:
    """A piece of a text, which steers no terminal."""
    return without_steering(piece) if sys.stdout.isatty() else piece


def _all_shown(streams: Sequence[Stream], shown: bool) -> tuple[list[str], bool]:
    """The texts, as `_shown`, up to where somebody interrupted."""
    texts: list[str] = []
    for stream in streams:
        if texts and shown:
            print()
        text, finished = _shown(stream, shown)
        texts.append(text)
        if not finished:
            return texts, False
    return texts, True


def _print_total(streams: Sequence[Stream], seconds: float) -> None:
    if len(streams) == 1:
        _print_speeds(streams[0])
        return
    prompt, text = (sum(getattr(one, f"{part}_tokens") for one in streams)
                    for part in ("prompt", "text"))  # fmt: skip
    print(
        f"{len(streams)} prompts: {prompt:,} tokens; texts: {text:,} tokens in {seconds:.2f} s in "
        f"all, {text / seconds:,.1f} tokens/s",
        file=sys.stderr,
    )


def _print_speeds(stream: Stream) -> None:
    figures = stream.figures()
    known = f", {figures['known_tokens']:,} of them known," if figures["known_tokens"] else ""
    parts = (
        f"{name}: {figures[f'{name}_tokens']:,} tokens{known if name == 'prompt' else ''} in "
        f"{figures[f'{name}_seconds']:.2f} s, {figures[f'{name}_tokens_per_second']:,.1f} tokens/s"
        for name in ("prompt", "text")
    )
    guessed = f"{figures['accepted_tokens']:,} of {figures['proposed_tokens']:,} guesses right"
    parts = (*parts, *[guessed] * bool(figures["proposed_tokens"]))
    print("; ".join((*parts, f"ended by {stream.reason or 'Ctrl-C'}")), file=sys.stderr)
