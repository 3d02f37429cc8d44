#!/usr/bin/env bash
# Make a virtual environment that serves and tests without a GPU. Safe to run again: each step leaves
# a stamp with the hash of its inputs in the environment, and is skipped while the hash is the same.
# A run that was interrupted goes on where it stopped.
#
#   deploy/cpu/setup.sh [--no-dev] [VENV]    VENV: else the variable VENV, else .venv in the repository
#   deploy/cpu/setup.sh --newest             VENV-newest, which lies over VENV: the newest SGLang that is
#                                            taken and what it needs of another version, nothing else
#
# PYTHON names the interpreter (3.11 or 3.12; default: the first of python3.11, python3.12, python3).
#
# A CPU build of torch is enough, and 3 GB smaller. pip takes one when its ordinary configuration
# knows where one is: an index of CPU wheels as PIP_INDEX_URL or PIP_EXTRA_INDEX_URL, or a folder of
# wheels as PIP_FIND_LINKS (or the same keys by `pip config set`). torch's installation page
# names the index. Without it the default build is installed, and works.
#
# All else comes from the lock files (*.lock), with hashes; deploy/lock.sh writes them. torch has
# none: a CPU build and the default one are different files, and which one is there is not known here.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dev=1 newest=0
if [[ ${1:-} == --no-dev ]]; then dev=0; shift; fi
if [[ ${1:-} == --newest ]]; then newest=1; shift; fi
venv=$(realpath -m -- "${1:-${VENV:-$root/.venv}}")
base=$venv
if ((newest)); then venv+=-newest; fi
torch_version=2.13.0

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
            2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 found: install one, or set PYTHON to its path"
}

if ((newest)); then
    [[ -e $base/.tandemkv/7-import-check ]] || die "no environment in $base: run this without --newest first"
    if [[ ! -x $venv/bin/python ]]; then
        say "creating $venv"
        "$base/bin/python" -m venv --without-pip "$venv" || die "cannot create $venv"
    fi
elif ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "creating $venv"
    "$(find_python)" -m venv --clear "$venv" ||
        die "cannot create $venv: install the venv module of this Python (python3-venv on Debian)"
fi
python=$venv/bin/python
pip=("$base/bin/python" -m pip)
if ((newest)); then pip+=(--python "$python"); fi
stamps=$venv/.tandemkv
mkdir -p "$stamps"

# Two runs at once would undo each other's work.
exec 9>"$stamps/lock"
flock 9 || die "cannot lock $stamps/lock"

log=$stamps/pip.log
# sglang and others are installed without their dependencies, so pip's resolver afterwards lists
# the pins that are not met ("... which is not installed", "... but you have ..."). They are meant;
# all of pip's output goes to a log, and is shown only if a step fails.
quietly() {
    if ! "$@" >"$log" 2>&1; then
        tail -n 40 "$log" >&2
        die "failed: $* (whole output in $log); run again to resume"
    fi
}

hash_of() { # of the arguments' text and, after --, of files
    local text=() files=()
    while (($#)) && [[ $1 != -- ]]; do text+=("$1"); shift; done
    shift || true
    files=("$@")
    { printf '%s\n' "${text[@]}"; ((${#files[@]})) && cat -- "${files[@]}"; } | sha256sum | cut -d' ' -f1
}

step() { # NAME HASH COMMAND...
    local name=$1 hash=$2
    shift 2
    if [[ $(cat "$stamps/$name" 2>/dev/null) == "$hash" ]]; then return; fi
    say "$name ..."
    rm -f "$stamps/$name"
    "$@"
    printf '%s\n' "$hash" >"$stamps/$name.tmp"
    mv "$stamps/$name.tmp" "$stamps/$name"
}

pip_install() { # pip compiles too: left to the first `serve`, it has that start take a minute
    quietly "${pip[@]}" install --disable-pip-version-check --no-input --progress-bar off "$@"
}

install_locked() { # FILE: exactly what it lists, whose hashes are compared
    pip_install --no-deps --require-hashes --only-binary :all: -r "$1"
}

install_shim() { # built from a copy: a build leaves folders beside the sources
    local copy
    copy=$(mktemp -d)
    cp -r "$here/shim/." "$copy"
    pip_install --no-deps --force-reinstall "$copy"
    rm -rf "$copy"
}

install_over() { # what differs, this package, and then the sight of all that does not
    local site
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -f "$site/base.pth" # pip would take what it sees there for installed here
    install_locked "$here/requirements-newest.lock"
    pip_install --no-deps -e "$root"
    # A .pth line adds a folder to the end of sys.path and ignores the .pth files in it; the shim's, which
    # has to run at each start, is named.
    printf '%s\nimport tandemkv_cpu_shim\n' \
        "$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" >"$site/base.pth"
}

check_imports() {
    # From /, so that the repository's folders are not importable by their bare names.
    (cd / && quietly env SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 PYTHONSAFEPATH=1 \
        "$python" -W ignore "$here/check_imports.py")
}

if ((newest)); then
    step "1-newest" "$(hash_of "$root" "$base" -- "$here/requirements-newest.lock" "$root/pyproject.toml")" \
        install_over
    step "2-import-check" \
        "$(hash_of -- "$stamps/1-newest" "$base"/.tandemkv/[1-4]-* "$here/check_imports.py")" check_imports
    say "ready: $venv, over $base"
    exit
fi

mapfile -t shim_files < <(find "$here/shim" -type f -not -name '*.pyc' | LC_ALL=C sort)

# The lock file has all that torch's CPU build needs as well. The default build brings a CUDA stack,
# which no lock file here has.
step "1-locked" "$(hash_of -- "$here/requirements.lock")" \
    install_locked "$here/requirements.lock"
step "2-torch" "$(hash_of "$torch_version")" pip_install "torch==$torch_version"
step "3-without-dependencies" "$(hash_of -- "$here/requirements-no-deps.lock")" \
    install_locked "$here/requirements-no-deps.lock"
step "4-shim" "$(hash_of -- "${shim_files[@]}")" install_shim
if ((dev)); then
    step "5-dev" "$(hash_of -- "$here/requirements-dev.lock")" \
        install_locked "$here/requirements-dev.lock"
fi
step "6-tandemkv" "$(hash_of "$root" -- "$root/pyproject.toml")" pip_install --no-deps -e "$root"
step "7-import-check" \
    "$(hash_of -- "$stamps"/[1-46]-* "$here/check_imports.py")" check_imports
say "ready: $venv"
