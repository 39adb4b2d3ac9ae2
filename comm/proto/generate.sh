#!/usr/bin/env bash
# Generates the Python modules of *.proto in place; with --check, fails if the committed ones are out of date.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$PWD/.venv/bin:$PATH"
out=.pythonpath
if [ "${1:-}" = --check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
python -P -m grpc_tools.protoc -I .pythonpath --python_out="$out" --grpc_python_out="$out" \
  --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" .pythonpath/atoll/comm/proto/*.proto
if [ "$out" != .pythonpath ]; then
  for file in "$out"/atoll/comm/proto/*; do
    cmp "$file" "comm/proto/$(basename "$file")" || { echo "comm/proto is out of date: run make proto" >&2; exit 1; }
  done
fi
