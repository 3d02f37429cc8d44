#!/usr/bin/env bash
# Write the lock files (*.lock) from the requirements that are kept by hand: every package that is
# needed, its version, and the hashes of its files. `make lock` runs it; it needs a package index.
#
# What is locked already stays at its version unless the requirements forbid it. Arguments are given
# to uv: `make lock ARGS=--upgrade` takes the newest versions. uv takes its index from UV_DEFAULT_INDEX
# or has its own default; none is written to the lock files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
uv=$(realpath -s -- "${VENV:-.venv}")/bin/uv
cpu=deploy/cpu
gpu=deploy/gpu
more=("$@")

compile() { # OUTPUT ARGUMENT...
    local output=$1
    shift
    printf 'lock: %s\n' "$output"
    "$uv" pip compile --quiet --generate-hashes --no-build --no-annotate \
        --custom-compile-command "make lock" --output-file "$output" "$@" "${more[@]}"
}

# Serving and testing without a GPU, on Python 3.11 and 3.12. torch is left out, because its builds
# have different hashes; setup.sh installs it. SGLang runs on Linux, so colorama is left out as well.
# rfc3987-syntax checks IRIs for jsonschema, which does without. It compiles a grammar when it is imported,
# two seconds in each process of each server that is tested; nothing else needs its parser, lark.
for_cpu=(--universal --python-version 3.11 --config-file "$cpu/uv.toml")
left_out=(torch colorama win32-setctime rfc3987-syntax lark)
for_cpu+=("${left_out[@]/#/--no-emit-package=}")
torch=$(sed -n 's/^torch_version=/torch==/p' "$cpu/setup.sh")
compile "$cpu/requirements.lock" "${for_cpu[@]}" "$cpu/requirements.txt" - <<<"$torch"
compile "$cpu/requirements-dev.lock" "${for_cpu[@]}" \
    --constraints "$cpu/requirements.lock" "$cpu/requirements-dev.txt"
compile "$cpu/requirements-acceptance.lock" "${for_cpu[@]}" \
    --constraints "$cpu/requirements.lock" --constraints "$cpu/requirements-dev.lock" \
    "$cpu/requirements-acceptance.txt"
compile "$cpu/requirements-no-deps.lock" --universal --python-version 3.11 --no-config --no-deps \
    "$cpu/requirements-no-deps.txt"
compile "$cpu/requirements-newest.lock" --universal --python-version 3.11 --no-config --no-deps \
    "$cpu/requirements-newest.txt"

# The image: Ubuntu 24.04 has Python 3.12. The second file is for the stage that builds the wheel.
for_gpu=(--python-version 3.12 --python-platform x86_64-manylinux_2_39 --no-config)
compile "$gpu/requirements.lock" "${for_gpu[@]}" --extra gpu --extra bench pyproject.toml
compile "$gpu/requirements-build.lock" "${for_gpu[@]}" "$gpu/requirements-build.txt"
