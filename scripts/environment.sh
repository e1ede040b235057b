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

# Installs Debian's copy of Fashion-MNIST, which a test reads; without it that test skips and says so.
install_fashion_mnist() {
    [ -d /usr/share/datasets/fashion-mnist ] || install_debian dataset-fashion-mnist
}

# Installs a browser, in which tests open pages; without one they skip and say so.
install_chromium() {
    command -v chromedriver > /dev/null || install_debian chromium chromium-driver
}

# Installs Debian's packages for tests, where apt-get is there and may be used without a password. Tried once a .venv.
install_debian() {
    local sudo=() tried=.venv/tried-$1
    if [ -e "$tried" ] || ! command -v apt-get > /dev/null; then
        return 0
    fi
    if [ "$(id -u)" -ne 0 ]; then
        sudo -n true 2> /dev/null || return 0
        sudo=(sudo -n)
    fi
    touch "$tried"
    echo "installing $* for tests (once)"
    {
        "${sudo[@]}" apt-get update -o Acquire::Retries=0 -o Acquire::http::Timeout=20
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            -o Acquire::http::Timeout=20 "$@"
    } > /dev/null 2>&1 < /dev/null || true
}
