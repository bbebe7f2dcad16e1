#!/bin/sh
# Joins the parts, checks their sums, installs without a network, and runs `mdps gpu-check` with what is given to this. Leaves the
# command as mdps-kit/mdps.
# MDPS_KIT is the folder it unpacks to (mdps-kit here), PYTHON the interpreter (python3). What was done is not done again.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${MDPS_KIT:-$PWD/mdps-kit}
python=${PYTHON:-python3}

fail() {
    echo "error: $1" >&2
    exit "${2:-1}"
}

command -v "$python" >/dev/null 2>&1 || fail "there is no $python: install Python @PYTHON@, or set PYTHON" 2
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$found" = "@PYTHON@" ] || fail "the wheels are for Python @PYTHON@ and $python is $found: set PYTHON to another" 2
[ -f "$here/SHA256SUMS" ] || fail "SHA256SUMS is missing in $here: copy it again"
kit=$(sha256sum <"$here/SHA256SUMS" | cut -d ' ' -f 1)

if [ "$(cat "$to/unpacked" 2>/dev/null)" != "$kit" ]; then
    echo "checking the parts" >&2
    while read -r sum name; do
        [ -f "$here/$name" ] || fail "$name is missing: copy it to $here"
        [ "$(sha256sum <"$here/$name" | cut -d ' ' -f 1)" = "$sum" ] || fail "$name is damaged: copy it again"
    done <"$here/SHA256SUMS"
    echo "unpacking to $to" >&2
    rm -rf "$to"
    mkdir -p "$to"
    cut -d ' ' -f 3 "$here/SHA256SUMS" | while read -r name; do cat "$here/$name"; done | tar -xf - -C "$to" ||
        fail "$to cannot be filled: is there room?"
    echo "$kit" >"$to/unpacked"
fi

if [ ! -f "$to/installed" ]; then
    echo "installing" >&2
    "$python" -m venv --clear "$to/venv" || fail "$python makes no virtual environment: install python3-venv" 2
    "$to/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$to/wheels" \
        -r "$to/requirements.txt" || fail "the wheels do not install: are they for this machine?"
    : >"$to/installed"
fi

cat >"$to/mdps" <<'END'
#!/bin/sh
# The command mdps. Libraries of NVIDIA that came as wheels lie where no loader looks.
here=$(cd "$(dirname "$0")" && pwd)
for folder in "$here"/venv/lib/python*/site-packages/nvidia/*/lib; do
    [ -d "$folder" ] && LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
done
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"
exec "$here/venv/bin/python" -m mdps.cli "$@"
END
chmod +x "$to/mdps"

exec "$to/mdps" gpu-check --work "$to/prepared" --out "$PWD/gpu-check" "$@"
