#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make the virtual environment of the CPU stack from requirements/cpu.lock. Run again, it returns at once unless
# the lock file, pyproject.toml or the folder has changed.
#
#   VENV=.venv        where the environment goes
#   PYTHON=python3.11 the interpreter to make it with
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE

VENV=${VENV:-.venv}
LOCK=requirements/cpu.lock
STAMP=$VENV/.cachemend-setup
LOG=$VENV/setup.log

say() { printf '%s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# Count what pip finds, so that the long step shows where it is; everything goes to the log.
progress() {
    tee -a "$LOG" | awk -v total="$1" '
        /^(Collecting|Processing|Requirement already)/ { if (++n % 20 == 0) { printf "  %d of %d packages found\n", n, total; fflush() } }
        /^Installing collected / && total > 1          { print "  all found, unpacking them (a minute or two)"; fflush() }'
}

# Without --no-compile pip compiles every module of every package, most of which nobody ever imports; those that are
# imported are compiled the first time.
install() { # install TOTAL PIP_ARGUMENTS...
    local total=$1
    shift
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile --no-deps "$@" 2>&1 | progress "$total"
}

want="$(cat $LOCK pyproject.toml | { sha256sum 2>/dev/null || shasum -a 256; } | cut -d' ' -f1) $PWD"
if [[ -f $STAMP && "$(cat "$STAMP")" == "$want" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

python=$(find_python) || fail "Python 3.11 or 3.12 is needed; name one with PYTHON=/path/to/python3.11"
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "setup: making $VENV with $python"
    "$python" -m venv "$VENV" || fail "could not make $VENV (on Debian: apt-get install python3.11-venv)"
fi
: >"$LOG"
trap 'code=$?; [[ $code -eq 0 ]] || { tail -n 15 "$LOG"; say "setup: failed; the whole log is $LOG"; }' EXIT

total=$(grep -c '==' $LOCK)
torch=$(grep '^torch==' $LOCK)
say "setup: installing $total packages, about 3.4 GB on disk, 2-3 minutes (log: $LOG)"
# The CPU build of torch comes first: where pip's own sources lack it, uv knows where PyTorch keeps its CPU builds.
say "  torch, the CPU build"
if ! install 1 "$torch"; then
    say "  pip does not find $torch; taking it through uv instead"
    install 1 uv
    "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --torch-backend cpu "${torch%+cpu}" 2>&1 | progress 1
fi
grep -v '^torch==' $LOCK >"$VENV/setup.requirements"
install "$total" -r "$VENV/setup.requirements"
install 1 --no-build-isolation --editable .

say "setup: checking that the parts load together"
"$VENV/bin/python" - <<'PY' 2>>"$LOG"
import importlib.metadata, sys

# Builds of these break beside the CPU build of torch; see [tool.uv] in pyproject.toml.
unwanted = {"torchvision", "torchaudio", "torchcodec", "triton"}
found = sorted(d.name for d in importlib.metadata.distributions() if d.name.lower() in unwanted)
if found:
    sys.exit(f"setup: {', '.join(found)} must not be in this environment: delete it and run setup again")

import faiss, ray, torch, transformers, vllm  # noqa: E401, F401
import kvcache.settings  # noqa: F401

if torch.version.cuda:
    sys.exit(f"setup: torch {torch.__version__} is a CUDA build; this environment is the CPU stack")
print(f"setup: torch {torch.__version__}, vllm {vllm.__version__}, ray {ray.__version__}: ready")
PY
printf '%s' "$want" >"$STAMP"
