#!/usr/bin/env bash
# Make .venv: stock SGLang on a machine without a GPU, and this package.
# Repeatable; after an interruption it goes on with the first step that did not finish.
#
# torch: `pip install torch` takes a CPU build where pip is configured for one (find-links,
# extra-index-url or PIP_EXTRA_INDEX_URL); elsewhere the CUDA build, which works too but is 3 GB.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${VENV:-.venv}
here=deploy/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONSAFEPATH=1

python=${PYTHON:-python3}
"$python" - <<'PY' || { echo "Python 3.11 or 3.12 is needed: PYTHON=/path/to/python3.11 make setup" >&2; exit 1; }
import sys
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PY

step() {  # step NAME KEY_FILES -- COMMAND...: run once per content of the files
    local name=$1 files=$2; shift 3
    local stamp="$venv/.stamp-$name" key
    key=$(cat $files | sha256sum | cut -c1-32)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && return 0
    echo "setup: $name" >&2
    "$@"
    echo "$key" > "$stamp"
}
# sglang's pins are the CUDA stack, which is left out on purpose: pip's complaint about them is noise.
pip() {
    "$venv/bin/python" -m pip install -q "$@" 2> >(grep -vE "^(WARNING: Location|ERROR: pip's dependency|sglang 0)" >&2)
}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
step torch "$0" -- pip torch==2.13.0
step no-deps "$here/requirements-no-deps.txt" -- pip --no-deps -r "$here/requirements-no-deps.txt"
step requirements "$here/requirements.txt" -- pip -r "$here/requirements.txt"
step dev "$here/requirements-dev.txt" -- pip -r "$here/requirements-dev.txt"
shim=$(mktemp -d); trap 'rm -rf "$shim"' EXIT
cp -r "$here/shim/." "$shim"
step shim "$here/shim/setup.py $here/shim/tandemkv_cpu_shim.py $here/shim/sgl_kernel/__init__.py" -- pip --no-build-isolation --force-reinstall --no-deps "$shim"
step tandemkv pyproject.toml -- pip --no-build-isolation --no-deps -e .
step check "pyproject.toml $here/requirements.txt" -- env SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore -c \
    "from tandemkv.inference_rank.sglang_contract import check_contract; check_contract()"
echo "setup: done ($venv)" >&2
