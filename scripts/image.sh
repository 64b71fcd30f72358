#!/usr/bin/env bash
# image.sh TARGET [MODEL]: builds the image TARGET (cpu, cuda) from this checkout by buildah, without Docker or root's
# daemon. If MODEL is a directory, `kt doctor` runs in the image, and a server of MODEL, which is asked a question.
#   PIP    whose index and wheels are used          WHEEL  a wheel of Tandem; else one is built, for this CPU's tiers
#   BASE   an image with Debian 12; else mmdebstrap makes one      PORT   the server's      TAG   the image's name
set -euo pipefail
cd "$(dirname "$0")/.."
target=$1 model=${2:-} port=${PORT:-30000} image=${TAG:-tandem:$1} context=build/image/$1
read -ra pip <<<"${PIP:-python3 -m pip}"

say() { echo "image.sh: $SECONDS s: $*"; }
fail() { echo "image.sh: $*" >&2; exit 1; }

for program in buildah mmdebstrap curl; do
  command -v "$program" >/dev/null || fail "$program is missing: apt-get install buildah mmdebstrap curl"
done

wheel() {
  rm -rf "$context/dist/"*.whl
  mkdir -p "$context/dist/deps"
  if [ -n "${WHEEL:-}" ]; then cp "$WHEEL" "$context/dist"; return; fi
  "${pip[@]}" wheel -q --no-deps --no-build-isolation --wheel-dir "$context/dist" .
}

# Everything that pip needs is fetched out here, where certificates and mirrors are set up.
dependencies() {
  local into=(download -q --dest "$context/dist/deps") torch='torch>=2.11,<3' extra='[gpu]' ours
  ours=$(ls "$context"/dist/*.whl)
  if [ "$target" = cpu ]; then
    torch='torch==2.13.0+cpu' extra=
    "${pip[@]}" "${into[@]}" --no-deps "$torch" ||
      "${pip[@]}" "${into[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
  fi
  "${pip[@]}" "${into[@]}" --find-links "$context/dist/deps" "$torch" "$ours$extra"
}

base() {
  local container tar
  tar=$(mktemp --suffix .tar)
  mmdebstrap --quiet --variant=minbase bookworm "$tar"
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$tar" / >/dev/null
  buildah commit --quiet --rm "$container" tandem-base >/dev/null
  rm "$tar"
}

# The health check is Docker's: OCI's form of an image has none.
build() {
  buildah build --isolation chroot --format docker --file Dockerfile --target "$target" --tag "$image" \
    --build-arg PIP_NO_INDEX=1 --build-arg "BASE=${BASE:-tandem-base}" "$context"
}

inside() { buildah run --isolation chroot --volume "$(realpath "$model"):/models/served:ro" "$container" -- "$@"; }

serve() {
  local log started=$SECONDS
  log=$(mktemp)
  inside kt serve /models/served --host 127.0.0.1 --port "$port" >"$log" 2>&1 &
  until healthy; do
    kill -0 $! 2>/dev/null || { cat "$log" >&2; fail "the server has ended"; }
    [ $((SECONDS - started)) -lt 300 ] || { cat "$log" >&2; fail "the server is not ready after 300 s"; }
    sleep 0.5
  done
}

# The image's own check.
healthy() {
  local code
  code=$(buildah inspect --type image --format '{{index .Docker.Config.Healthcheck.Test 3}}' "$image")
  inside python -c "${code//:30000/:$port}" >/dev/null 2>&1
}

ask() {
  curl --silent --show-error --fail "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}'
  echo
}

# buildah hands no signal on, but its children take one.
clean_up() {
  for job in $(jobs -p); do pkill -TERM -P "$job" 2>/dev/null || true; done
  wait
  buildah rm "$container" >/dev/null
}

wheel && say "the wheel is there"
dependencies && say "what it depends on is there"
[ -n "${BASE:-}" ] || { base && say "the base is made"; }
build && say "$image is built, $(buildah images --format '{{.Size}}' "$image")"
[ -d "$model" ] || exit 0
container=$(buildah from "$image")
trap clean_up EXIT
inside id
inside kt doctor
serve && say "the server is healthy"
ask && say "the first answer has come"
