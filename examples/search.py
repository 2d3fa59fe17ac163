"""Search by meaning: real sentences, a real encoder, vectors of 4 bits.

Run with the extra "demo" installed:  python examples/search.py

The sentences are prose from Python's manual and from the docstrings of its library, of NumPy and
of PyTorch, as they are installed here; nothing is downloaded. Some are kept out as queries. Each
query's 10 nearest by exact float32 cosine are compared with what an index of 8 and of 4 bits finds,
with and without rescoring.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
import time
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

from lowbit import VectorIndex
from lowbit.models.data import extract
from lowbit.models.networks import load_encoder, tokenize

K, CANDIDATES = 10, 40
SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
BATCH = 64


def docstrings(folder: Path) -> Iterator[str]:
    """The docstrings in the Python files under a folder, in the order of their paths."""
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED & set(path.relative_to(folder).parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue  # test data of Python's own, mostly
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def sentences(count: int) -> list[str]:
    """`count` different sentences, evenly from all there are."""
    folders = [Path(sysconfig.get_path("stdlib"))]
    folders += [Path(module.__file__ or "").parent for module in (np, torch)]
    texts = chain(topics.values(), *(docstrings(folder) for folder in folders))
    found = list(dict.fromkeys(extract(texts)))
    if len(found) < count:
        raise SystemExit(f"the files here hold {len(found)} sentences; ask for no more than that")
    return [found[i * len(found) // count] for i in range(count)]


def embed(given: list[str]) -> np.ndarray:
    """Unit vectors, float32 [n, 384]. Sentences of like length go together, to pad little."""
    encoder = load_encoder()
    order = sorted(range(len(given)), key=lambda i: len(given[i]))
    batches = tokenize([given[i] for i in order], BATCH)
    with torch.inference_mode():
        rows = torch.cat([encoder(*batch) for batch in batches]).numpy()
    vectors = np.empty_like(rows)
    vectors[order] = rows
    return vectors


def main() -> None:
    """Embed, search, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sentences", type=int, default=6000)
    parser.add_argument("--queries", type=int, default=500)
    options = parser.parse_args()
    if not 1 <= options.queries <= options.sentences - CANDIDATES:
        parser.error(f"queries must be at least 1 and leave {CANDIDATES} sentences to be found")
    texts = sentences(options.sentences)
    start = time.perf_counter()
    rows = embed(texts)
    print(f"{len(texts)} sentences embedded in {time.perf_counter() - start:.0f} s")
    asked = np.random.default_rng(0).permutation(len(texts))[: options.queries]
    kept = np.setdiff1d(np.arange(len(texts)), asked)
    vectors, queries = rows[kept], rows[asked]
    exact = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :K]

    found = exact
    for bits in (8, 4):
        for scale in ("vector", "dimension"):
            index = VectorIndex(rows.shape[1], bits, metric="cosine", scale=scale)
            index.add(vectors)
            print(f"{index}; the vectors themselves: {vectors.nbytes:,} bytes")
            for rescored in (False, True):
                if rescored:
                    scores, found = index.search(queries, K, rescore=vectors, candidates=CANDIDATES)
                else:
                    scores, found = index.search(queries, K)
                shared = sum(len(set(a) & set(b)) for a, b in zip(exact, found, strict=True))
                how = f"with {CANDIDATES} rescored" if rescored else "as they are"
                print(f"  recall@{K} {how}: {shared / exact.size:.4f}")
    print(f"\n{texts[asked[0]]}")
    for score, place in zip(scores[0, :3], found[0, :3], strict=True):
        print(f"  {score:.3f}  {texts[kept[place]]}")


if __name__ == "__main__":
    main()
