#!/usr/bin/env bash
# Makes a virtual environment in which vLLM's real scheduler and KV connectors run on a CPU: no GPU,
# no CUDA. Models cannot be run in it. About 1.1 GB to download and 2 GB on disk.
#   scripts/vllm/env.sh FOLDER [VLLM_VERSION]
# Takes Python 3.11 or later and a C compiler. A folder that is complete already is left as it is.
set -euo pipefail
folder=$(realpath --canonicalize-missing "${1:?folder of the environment}")
cd "$(dirname "$0")"
version=${2:-0.33.0}
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
pip() { command pip --disable-pip-version-check --quiet "$@" 2> >(grep -v 'vllm .* requires\|dependency conflicts' >&2); }

# vLLM asks for a gigabyte of CUDA packages that a scheduler never calls, so it comes without its
# dependencies, and those of them that it imports come by a list that is read from its metadata.
pip install --no-deps "vllm==$version"
python requirements.py vllm >"$folder/requirements.txt"
python requirements.py vllm --without-dependencies >"$folder/requirements-alone.txt"
pip install --requirement "$folder/requirements.txt" --requirement tools.txt
pip install --no-deps --requirement "$folder/requirements-alone.txt"

# PyPI's torch for x86-64 is linked against CUDA; empty libraries of those names let it load.
python cuda_stubs.py

site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# vLLM's CUDA kernels, most of its 900 MB, cannot be loaded here.
find "$site/vllm" -name '*.so' -delete
VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR python - <<'PY'
import vllm
from vllm.v1.core.sched.scheduler import Scheduler

print(f"vLLM {vllm.__version__}: {Scheduler.__module__} imports without CUDA")
PY
touch "$done_mark"
