# Sourced by the other scripts: makes .venv with vitlab in it, and reuses it while pyproject.toml is the same.
# Argument: extras to install, such as `dev,parquet`. PYTHON names the interpreter (3.11 or newer).

make_environment() {
    local extras=$1 python=${PYTHON:-python3} stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "vitlab needs Python 3.11 or newer, and $python is $("$python" --version 2>&1): set PYTHON=python3.11" >&2
        return 2
    fi
    stamp=.venv/installed-$(printf '%s' "$extras" | tr -c 'a-z' '-')
    if [ ! -x .venv/bin/vitlab ] || ! cmp -s pyproject.toml "$stamp"; then
        echo "installing vitlab${extras:+ with $extras} into .venv (once)"
        "$python" -m venv .venv
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
        cp pyproject.toml "$stamp"
    fi
    export PATH=$PWD/.venv/bin:$PATH
}
