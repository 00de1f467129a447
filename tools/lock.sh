#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compile requirements/cpu.lock from pyproject.toml (needs uv: pip install uv).
#
#   tools/lock.sh             takes the CPU build of torch from where uv knows it
#   tools/lock.sh WHEEL_DIR   takes it from a folder of wheels instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -gt 0 ]]; then
    torch=(--find-links "$1")
else
    torch=(--torch-backend cpu)
fi
uv pip compile pyproject.toml --extra cpu --extra dev --python-version 3.11 "${torch[@]}" \
    --no-emit-find-links --no-emit-index-url --no-header --no-annotate --output-file requirements/cpu.lock
# Torch is pinned by its local version, so that no other build of it can be installed in its place.
sed -i.bak -E 's/^torch==([0-9.]+)$/torch==\1+cpu/' requirements/cpu.lock
rm requirements/cpu.lock.bak
