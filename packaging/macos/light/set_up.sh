#!/bin/sh
# Make the environment of the light app: set_up.sh ENVIRONMENT PACKAGE STATE LOG
#
# PACKAGE holds the wheel and constraints.txt. STATE is a file that the progress window reads: working, finished or failed, on the next
# line a sentence, and after some failures the address of a page that helps. LOG takes stdout and stderr; a failure's reason is looked for in it. It installs with uv where there is one
# and with pip otherwise, into an environment of a Python of this Mac, or else of one that uv downloads.
set -u

environment=$1 package=$2 state=$3 log=$4
NEEDED_MB=2500 # the environment, and the downloads on their way into it
PYTHON_PAGE=https://www.python.org/downloads/macos/
child=

# shellcheck source=packaging/macos/light/find_python.sh
. "$(dirname "$0")/find_python.sh"

main() {
    exec >"$log" 2>&1
    trap stop TERM INT HUP
    say working "Looking for Python…"
    check_space
    uv=$(find_program uv) || uv=
    python=$(find_python) || python=
    echo "uv: ${uv:-none}, Python: ${python:-none}"
    [ -n "$uv$python" ] || fail \
        "GRPO Studio needs Python 3.11 or newer. Install it from python.org, and open GRPO Studio again." "$PYTHON_PAGE"
    rm -rf "$environment"
    mkdir -p "$(dirname "$environment")"
    say working "Making an environment…"
    make_environment
    say working "Downloading and installing packages…"
    install_packages
    say working "Trying it…"
    run "$environment/bin/python" -P -c "import mlx.core, PySide6.QtWidgets, grpo_studio.launch" \
        || fail "GRPO Studio was installed, but does not start."
    date >"$environment/complete"
    remove_older
    say finished "GRPO Studio is set up."
}

check_space() {
    free_mb=$(df -Pm "$(dirname "$state")" | awk 'NR == 2 { print $4 }')
    [ "${free_mb:-$NEEDED_MB}" -ge $NEEDED_MB ] \
        || fail "Setting up GRPO Studio needs $NEEDED_MB MB of free disk space, and there are $free_mb."
}

make_environment() {
    if [ -z "$python" ]; then
        run "$uv" venv --managed-python --python 3.13 "$environment" \
            || fail "$(why "uv could not provide Python 3.13.")"
    elif [ -n "$uv" ]; then
        run "$uv" venv --python "$python" "$environment" || fail "$(why "The environment could not be made.")"
    else
        run "$python" -m venv "$environment" || fail "$(why "The environment could not be made.")"
    fi
}

# Wheels only: a Mac need not have a compiler.
install_packages() {
    set -- "$package"/*.whl
    if [ -n "$uv" ]; then
        run "$uv" pip install --python "$environment/bin/python" --constraint "$package/constraints.txt" --only-binary :all: "$1"
    else
        run "$environment/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
            --constraint "$package/constraints.txt" --only-binary :all: "$1"
    fi || fail "$(why "The packages could not be installed.")"
}

# Environments of earlier versions, unless a window or a training run still uses one.
remove_older() {
    processes=$(ps -A -o args=) || return 0
    for other in "$(dirname "$environment")"/*; do
        case "$other" in "$environment") continue ;; esac
        case "$processes" in *"$other/bin/"*) continue ;; esac
        rm -rf "$other"
    done
}

# why SENTENCE: what the log says is the reason, in words; SENTENCE where it says nothing that is known here.
why() {
    if grep -qiE 'no space left|disk quota' "$log"; then
        echo "The disk is full."
    elif grep -qiE 'resolve|dns error|nodename nor servname|failed to establish|connection (refused|reset)|timed out|offline' "$log"; then
        echo "The packages could not be downloaded. Check the internet connection, and open GRPO Studio again."
    else
        echo "$1"
    fi
}

# run COMMAND…: wait for it in a way that a signal interrupts, so that Cancel ends it as well.
run() {
    echo "+ $*"
    "$@" </dev/null &
    child=$!
    wait "$child"
    code=$?
    child=
    return $code
}

stop() {
    if [ -n "$child" ]; then # and waited for, or it would go on writing into the folder that is removed
        kill "$child" 2>/dev/null
        wait "$child"
    fi
    rm -rf "$environment"
    exit 143
}

# say STATE SENTENCE [PAGE]: replace the file as a whole, since the window may read it at any moment.
say() {
    printf '%s\n' "$@" >"$state.new"
    mv -f "$state.new" "$state"
    echo "$2"
}

# fail SENTENCE [PAGE]
fail() {
    rm -rf "$environment"
    say failed "$@"
    exit 1
}

main
