"""Language models in OpenVINO GenAI."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from lowbit_lab.bench.core.case import implementation
from lowbit_lab.bench.lm.contender import TEXT, Contender, Loaded, ModelWork


@implementation("lm")
class OpenVinoGenAi(Contender):
    """`LLMPipeline`, which reads GGUF files."""

    name = "OpenVINO GenAI"
    needs = ("openvino_genai",)
    package = "OpenVINO GenAI", "openvino-genai"

    def open(self, work: ModelWork) -> Loaded:
        return _Pipeline(work)


class _Pipeline(Loaded):
    """It does not give logits; it tells when tokens come."""

    def __init__(self, work: ModelWork) -> None:
        super().__init__(work)
        import openvino  # pyright: ignore[reportMissingImports]
        import openvino_genai  # pyright: ignore[reportMissingImports]

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # each turn has the same prompts
        tokens = np.array(work.prompts, np.int64)
        if work.operation == TEXT:  # all prompts in one step, which ends before the text begins
            scheduler.max_num_batched_tokens = max(256, tokens.size)
        options = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": work.threads}
        self._pipeline = openvino_genai.LLMPipeline(work.path, "CPU", **options)
        self._options = openvino_genai.GenerationConfig()
        self._options.ignore_eos, self._options.do_sample = True, False
        arrays = (openvino.Tensor(array) for array in (tokens, np.ones_like(tokens)))
        self._prompts = openvino_genai.TokenizedInputs(*arrays)

    def seconds(self) -> float:
        steps = self.work.steps if self.work.operation == TEXT else 0
        self._options.max_new_tokens = 1 + steps
        begin = time.perf_counter()
        result: Any = self._pipeline.generate(self._prompts, self._options)
        if not steps:
            return time.perf_counter() - begin
        times = result.perf_metrics.raw_metrics.m_new_token_times
        if len(times) != 1 + steps:
            raise RuntimeError(f"the pipeline took {len(times)} steps for {1 + steps} tokens")
        return (times[-1] - times[0]) / 1e3 / steps

    def logits(self) -> None:
        return None
