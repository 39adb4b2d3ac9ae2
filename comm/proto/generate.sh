#!/usr/bin/env bash
# Generates the Python modules of atoll.proto in place. `make proto` calls it; `make check` fails on a difference.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"
python -P -m grpc_tools.protoc -I .pythonpath --python_out=.pythonpath --grpc_python_out=.pythonpath \
  --mypy_out=quiet:.pythonpath --mypy_grpc_out=quiet:.pythonpath .pythonpath/atoll/comm/proto/*.proto
