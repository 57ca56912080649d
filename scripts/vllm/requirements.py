"""Print what a package requires, less what only a GPU, a video or a compiler needs.

scripts/vllm/requirements.py PACKAGE [--without-dependencies]

Prints the packages to install with their dependencies, or those to install without.
"""

import re
import sys
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement

# Not imported by the scheduler: CUDA kernels and compilers, video and sound, and exporters.
LEFT_OUT = re.compile(
    r"torch(audio|vision|codec)|pynvvideocodec|opencv|flashinfer|tilelang|nvidia-|nvtx|triton"
    r"|fastsafetensors|instanttensor|quack|tokenspeed|humming|numba|ray|xformers"
    r"|opentelemetry|runai|mooncake|nixl|cupy"
)
# Imported, but ask for what is left out.
ALONE = re.compile(r"(torch|xgrammar|compressed-tensors|depyf|apache-tvm-ffi)$")
# vLLM pins the newest certificates of its release day, which a registry may not have yet.
UNPINNED = re.compile(r"(certifi|setuptools)$")


def main() -> None:
    """Print one requirement a line."""
    package, *flags = sys.argv[1:]
    wanted = []
    for text in metadata.requires(package) or ():
        need = Requirement(text)
        name = need.name.lower()
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        if LEFT_OUT.match(name) or UNPINNED.match(name):
            continue
        need.marker = None
        if bool(ALONE.match(name)) == ("--without-dependencies" in flags):
            # A registry has no local versions, such as torch 2.13.0+cpu.
            wanted.append(re.sub(r"(==[\d.]+)\+\w+", r"\1", str(need)))
    print("\n".join(wanted))


if __name__ == "__main__":
    main()
