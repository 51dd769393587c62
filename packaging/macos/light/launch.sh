#!/bin/sh
# The program of the light app: start GRPO Studio from its environment, and make that first where it is missing.
#
# The bundle holds a wheel and no Python. The environment lies in Application Support under the name in package/environment_name,
# which changes with the wheel, so a newer app makes itself a new one. Nothing is written into the bundle: it may be moved,
# copied, or lie on a disk image. What the Finder gives a program: no terminal, and a PATH of /usr/bin:/bin:/usr/sbin:/sbin.
set -u

contents=$(cd "$(dirname "$0")/.." && pwd -P) || exit 1
scripts=$contents/Resources/set_up
package=$contents/Resources/package
support="$HOME/Library/Application Support/GRPO Studio"
environment=$support/environments/$(cat "$package/environment_name")
logs=$HOME/Library/Logs/GRPO\ Studio
log=$logs/set_up.log

main() {
    run_natively "$@"
    is_ready || set_up
    mkdir -p "$logs"
    # -P: a folder named `app` in the working directory must not be run in place of ours.
    exec "$environment/bin/python" -P -m grpo_studio.app "$@" >"$logs/window.log" 2>&1
}

# A script has no architecture, so macOS may start it under Rosetta, where a Python finds no wheels of mlx.
run_natively() {
    [ "$(uname -s) $(uname -m)" = "Darwin x86_64" ] || return 0
    if [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" = 1 ]; then
        exec arch -arm64 /bin/sh "$0" "$@"
    fi
    tell "GRPO Studio needs a Mac with Apple silicon (M1 or newer)." "Quit"
    exit 1
}

# Written last, so an environment without it is unfinished. Its Python is a link that dangles when that Python has been removed.
is_ready() {
    [ -f "$environment/complete" ] && [ -x "$environment/bin/python" ]
}

set_up() {
    mkdir -p "$support" "$logs"
    take_lock
    if is_ready; then # by the process that had the lock before
        give_lock_back
        return
    fi
    ask "GRPO Studio sets itself up once: it downloads about 300 MB of Python packages into its own folder in Application Support, where they take about 1 GB. This takes a few minutes." "Set Up" "Quit" || exit 0
    run_with_window
    case $(head -n 1 "$progress/state") in
        finished) ;;
        cancelled) exit 0 ;;
        *) report_failure ;;
    esac
    give_lock_back
}

# One process at a time: a lock whose holder has ended is taken over.
take_lock() {
    lock=$support/set_up.lock
    if ! mkdir "$lock" 2>/dev/null; then
        if kill -0 "$(cat "$lock/pid" 2>/dev/null)" 2>/dev/null; then
            tell "GRPO Studio is being set up already." "OK"
            exit 0
        fi
    fi
    echo $$ >"$lock/pid"
    progress=$lock
    trap give_lock_back EXIT
}

give_lock_back() {
    rm -rf "$lock"
    trap - EXIT
}

# The work runs beside the window. The window ends when the work does, or when its Cancel button is pressed; it may also fail to
# appear, and then the work is waited for without it.
run_with_window() {
    printf 'working\nStarting…\n' >"$progress/state"
    /bin/sh "$scripts/set_up.sh" "$environment" "$package" "$progress/state" "$log" &
    worker=$!
    osascript -l JavaScript "$scripts/progress.js" "$progress" "$log" "$contents/Resources/app.icns" >>"$logs/progress.log" 2>&1
    if [ -f "$progress/cancel" ]; then
        kill "$worker" 2>/dev/null
        wait "$worker"
        echo cancelled >"$progress/state"
        return
    fi
    wait "$worker"
}

report_failure() {
    sentence=$(sed -n 2p "$progress/state")
    page=$(sed -n 3p "$progress/state")
    if [ -n "$page" ]; then
        ask "$sentence" "Open Website" "Quit" && open "$page"
    elif ask "${sentence:-Setting up ended with an error.}" "Show Log" "Quit"; then
        open "$log"
    fi
    exit 1
}

# ask TEXT YES NO: true when YES was pressed.
ask() {
    osascript -e 'on run {message, yes, no, picture}' -e 'activate' \
        -e 'display dialog message with title "GRPO Studio" buttons {no, yes} default button yes cancel button no with icon POSIX file picture' \
        -e 'end run' "$1" "$2" "$3" "$contents/Resources/app.icns" >/dev/null 2>&1
}

# tell TEXT BUTTON
tell() {
    osascript -e 'on run {message, ok}' -e 'activate' \
        -e 'display dialog message with title "GRPO Studio" buttons {ok} default button ok with icon caution' \
        -e 'end run' "$1" "$2" >/dev/null 2>&1
}

main "$@"
