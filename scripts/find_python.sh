#!/bin/sh
# Prints the first Python that Tandem supports: 3.11 to 3.14.
for python in python3 python3.14 python3.13 python3.12 python3.11; do
  if command -v "$python" >/dev/null 2>&1 &&
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
    command -v "$python"
    exit 0
  fi
done
echo "no Python 3.11 to 3.14 found; install one, or name it: make PYTHON=/path/to/python" >&2
echo python-3.11-to-3.14-not-found
