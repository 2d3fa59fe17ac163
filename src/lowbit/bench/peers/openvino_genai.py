"""Language models in OpenVINO GenAI."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from lowbit.bench.core.case import implementation
from lowbit.bench.lm.contender import PROMPT, Contender, Loaded, Work


@implementation("lm")
class OpenVinoGenAi(Contender):
    """`LLMPipeline`, which reads GGUF files."""

    name = "OpenVINO GenAI"
    needs = ("openvino_genai",)
    package = "OpenVINO GenAI", "openvino-genai"

    def open(self, work: Work) -> Loaded:
        return _Pipeline(work)


class _Pipeline(Loaded):
    """It does not give logits: a text's time is what the pipeline takes beyond its first token."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        import openvino  # pyright: ignore[reportMissingImports]
        import openvino_genai  # pyright: ignore[reportMissingImports]

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # each turn has the same prompts
        options = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": work.threads}
        self._pipeline = openvino_genai.LLMPipeline(work.path, "CPU", **options)
        self._options = openvino_genai.GenerationConfig()
        self._options.ignore_eos, self._options.do_sample = True, False
        tokens = np.array(work.prompts, np.int64)
        arrays = (openvino.Tensor(array) for array in (tokens, np.ones_like(tokens)))
        self._prompts = openvino_genai.TokenizedInputs(*arrays)

    def _generate(self, tokens: int) -> float:
        self._options.max_new_tokens = tokens
        begin = time.perf_counter()
        result: Any = self._pipeline.generate(self._prompts, self._options)
        seconds = time.perf_counter() - begin
        if any(len(text) != tokens for text in result.tokens):
            raise RuntimeError("the pipeline ends a text before it is to")
        return seconds

    def seconds(self) -> float:
        first = self._generate(1)
        if self.work.operation == PROMPT:
            return first
        return (self._generate(1 + self.work.steps) - first) / self.work.steps

    def logits(self) -> None:
        return None
