#!/usr/bin/env bash
# Puts a redis-server into .venv/bin for the tests, unless the machine has one: Debian's
# packages unpacked beside it.  So no service is started, and no one needs to be root.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${VENV:-.venv}" && pwd)

if command -v redis-server > /dev/null; then
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if command -v apt-get > /dev/null && (
  cd "$work"
  # Its other dependencies are part of any Debian.
  packages="redis-server redis-tools liblzf1 libjemalloc2"
  # Lists that are missing or old name files that are gone.
  apt-get -qq download $packages 2> /dev/null \
    || { apt-get -qq update && apt-get -qq download $packages; }
); then
  for package in "$work"/*.deb; do
    dpkg-deb --extract "$package" "$venv/redis"
  done
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' \
    "$(dirname "$(find "$venv/redis" -name 'liblzf.so.1')")" "$venv/redis/usr/bin/redis-server" \
    > "$venv/bin/redis-server"
  chmod +x "$venv/bin/redis-server"
fi
if ! "$venv/bin/redis-server" --version; then
  echo "no redis-server: tests of redis:// sessions will fail; install it (Debian: redis-server)" >&2
fi
