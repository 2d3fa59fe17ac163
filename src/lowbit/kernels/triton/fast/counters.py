"""Words in which the programs of a launch count who has finished: 0 before each launch, and set to
0 again by the last program, so that nothing has to be launched for it."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.registry.locks import Lock

_WORDS, _OF_A_STREAM = 1 << 20, 1 << 14
_LOCK = Lock()


class _Pool:
    """The words of one GPU. Launches that may run at the same time never share any: each stream has
    its own, and so has each launch within a CUDA graph, for good."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(_WORDS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # before another stream uses them
        self.free = 0
        self.streams: dict[int, Tensor] = {}

    def take(self, count: int) -> Tensor | None:
        """So many words that nobody has, if there are still some."""
        first, self.free = self.free, self.free + count + -count % 32  # of whole lines
        return self.words[first : first + count] if self.free <= _WORDS else None


_pools: dict[torch.device, _Pool] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` words of 0, int32, for one launch on the current stream."""
    found = None
    if device.type == "cuda":
        captured = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(device).cuda_stream
        with _LOCK:
            if device not in _pools and not captured:
                _pools[device] = _Pool(device)
            if (pool := _pools.get(device)) is not None and captured:
                found = pool.take(count)
            elif pool is not None and count <= _OF_A_STREAM:
                if stream not in pool.streams and (own := pool.take(_OF_A_STREAM)) is not None:
                    pool.streams[stream] = own
                found = pool.streams.get(stream)
    # Where there are none left, or a graph is the first to ask, they are zeroed before each launch.
    return torch.zeros(count, dtype=torch.int32, device=device) if found is None else found
