"""Synthesized tones, whose pitch is known exactly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

RATE = 16_000  # samples a second
LOWEST, HIGHEST = 65.0, 1500.0  # Hz, evenly spread in octaves
HARMONICS = 12


def tones(count: int, samples: int, seed: int) -> tuple[Array, npt.NDArray[np.float64]]:
    """Frames [count, samples] of zero mean and unit variance, and their pitches [count] in Hz.

    Each is a sum of harmonics with random phases, that fall off by a random slope, and white noise
    from 5 dB above them to 20 dB below.
    """
    random = np.random.default_rng(seed)
    pitch = LOWEST * (HIGHEST / LOWEST) ** random.random(count)
    number = np.arange(1, HARMONICS + 1)
    partial = pitch[:, None] * number  # Hz
    strength = number ** -random.uniform(0.5, 2.0, (count, 1)) * (partial < RATE / 2)
    phase = random.uniform(0, 2 * np.pi, partial.shape)
    angle = 2 * np.pi * partial[:, :, None] * (np.arange(samples) / RATE) + phase[:, :, None]
    sound = np.einsum("ch,chs->cs", strength, np.sin(angle))
    sound /= sound.std(1, keepdims=True)
    level = 10 ** (random.uniform(-20, 5, (count, 1)) / 20)
    sound += level * random.standard_normal(sound.shape)
    sound -= sound.mean(1, keepdims=True)
    return (sound / sound.std(1, keepdims=True)).astype(np.float32), pitch
