#!/bin/sh
# Installs GRPO Studio for the user who runs this, or removes it again. Needs no root and nothing but a POSIX shell.
#
#   ./install.sh              into ~/.local: the app, its entry in the menu, its icon, two commands
#   ./install.sh --prefix P   into P instead
#   ./install.sh --remove     remove what was installed; runs and settings stay (they are under ~/.local/share/grpo-studio and ~/.config)
set -eu

here=$(cd "$(dirname "$0")" && pwd)
prefix=${HOME}/.local
remove=no
while [ $# -gt 0 ]; do
    case $1 in
        --prefix) [ $# -ge 2 ] || { echo "--prefix needs a folder." >&2; exit 2; }; prefix=$2; shift 2 ;;
        --remove) remove=yes; shift ;;
        *) echo "usage: install.sh [--prefix FOLDER] [--remove]" >&2; exit 2 ;;
    esac
done
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac

app=$prefix/opt/grpo-studio
desktop=$prefix/share/applications/grpo-studio.desktop
icon=$prefix/share/icons/hicolor/scalable/apps/grpo-studio.svg

refresh() { # menus notice new entries sooner with it, and all the same without it
    if command -v update-desktop-database >/dev/null 2>&1; then update-desktop-database -q "$prefix/share/applications" || true; fi
}

if [ $remove = yes ]; then
    rm -rf "$app"
    rm -f "$desktop" "$icon" "$prefix/bin/grpo-studio" "$prefix/bin/grpo-studio-backend"
    refresh
    echo "GRPO Studio is removed from $prefix. Runs and settings are kept."
    exit 0
fi

mkdir -p "$prefix/opt" "$prefix/bin" "$(dirname "$desktop")" "$(dirname "$icon")"
# Beside the old version and then in its place: an update that is interrupted leaves a whole app. A run that is training keeps the files
# that it has open, but starts its helpers anew from this folder: update when nothing trains.
new=$app.new
rm -rf "$new"
cp -R "$here/GRPO Studio" "$new"
rm -rf "$app"
mv "$new" "$app"
ln -sf "$app/grpo-studio" "$prefix/bin/grpo-studio"
ln -sf "$app/grpo-studio-backend" "$prefix/bin/grpo-studio-backend"
# The menu does not know the user's PATH, so its entry names the program in full; a path with spaces stands in quotes there.
sed "s|^Exec=grpo-studio|Exec=\"$app/grpo-studio\"|" "$here/grpo-studio.desktop" > "$desktop"
cp "$here/grpo-studio.svg" "$icon"
refresh
echo "GRPO Studio is installed in $app. Start it from the menu, or with $prefix/bin/grpo-studio"
