#!/bin/sh
# make_venv.sh DIR: a virtual environment in DIR from $PYTHON. Debian ships Python without ensurepip unless
# python3-venv is installed; then pip of $PYTHON itself puts a pip into the new environment.
set -eu
dir=$1
[ -x "$dir/bin/python" ] && "$dir/bin/python" -m pip --version >/dev/null 2>&1 && exit 0
echo "Making a virtual environment in $dir with $("$PYTHON" --version) ..."
if "$PYTHON" -c 'import ensurepip' 2>/dev/null && "$PYTHON" -m venv "$dir" 2>/dev/null; then
  # Older pips download whole wheels, CUDA's too, only to look at what they need (scripts/install_torch.py).
  "$dir/bin/python" -m pip --disable-pip-version-check install -qq --upgrade "pip>=23.3"
  exit 0
fi
"$PYTHON" -m venv --clear --without-pip "$dir"
"$PYTHON" -m pip --disable-pip-version-check --python "$dir/bin/python" install -qq "pip>=23.3" || {
  echo "cannot install pip into $dir; on Debian and Ubuntu: apt install python3-venv" >&2
  exit 1
}
