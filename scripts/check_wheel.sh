#!/usr/bin/env bash
# Builds the wheel, installs it without extras in an empty environment, and imports it.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m build --quiet --wheel --outdir "$work/dist"
"${PYTHON:-python3}" -m venv "$work/venv"
pip="$work/venv/bin/python -m pip --disable-pip-version-check"
# The CPU build; the wheel alone would bring CUDA's.
$pip install --quiet torch==2.13.0
$pip install --quiet "$work"/dist/weightwire-*.whl
cd "$work"
venv/bin/python -W error -c 'import weightwire; print("weightwire", weightwire.__version__)'
venv/bin/weightwire backends
