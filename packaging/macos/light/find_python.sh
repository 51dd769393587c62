# shellcheck shell=sh
# Where a Mac may have uv and Python, since the Finder's PATH names none of these places. Sourced by set_up.sh.
#
# /usr/bin is left out: its python3 is 3.9, and where Apple's command line tools are missing, running it asks to install them.

# Folders of programs, one a line, in the order in which they are searched.
program_folders() {
    printf '%s\n' "$HOME/.local/bin" /opt/homebrew/bin /usr/local/bin "$HOME/.cargo/bin" /opt/local/bin "$HOME/miniforge3/bin"
    for folder in /Library/Frameworks/Python.framework/Versions/3.1*/bin "$HOME"/.local/share/uv/python/cpython-3.1*/bin \
        "$HOME"/.pyenv/versions/3.1*/bin "$HOME"/.local/share/mise/installs/python/3.1*/bin; do
        if [ -d "$folder" ]; then printf '%s\n' "$folder"; fi
    done
}

# find_program NAME: its path in the first folder that has it.
find_program() {
    program_folders | while IFS= read -r folder; do
        if [ -x "$folder/$1" ] && [ ! -d "$folder/$1" ]; then
            printf '%s\n' "$folder/$1"
            break
        fi
    done | grep .
}

# The first Python that suits, newest tried versions first; 3.14 last, as packages are late for the newest.
find_python() {
    for name in python3.13 python3.12 python3.11 python3.14 python3; do
        program_folders | while IFS= read -r folder; do
            if suits "$folder/$name"; then
                printf '%s\n' "$folder/$name"
                break
            fi
        done | grep . && return 0
    done
    return 1
}

# suits PYTHON: it runs, is 3.11 to 3.14, can make an environment, and is built for this machine rather than for Rosetta.
suits() {
    [ -x "$1" ] && "$1" -c '
import ensurepip, platform, sys, venv
sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 14) and platform.machine() == sys.argv[1]))
' "$(uname -m)" >/dev/null 2>&1 </dev/null
}
