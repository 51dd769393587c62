#!/bin/bash
# In a workflow: put the signing certificate into a keychain of its own, and the notary key into a file, both in RUNNER_TEMP.
#
# Reads CERTIFICATE (a .p12 file in base64) and CERTIFICATE_PASSWORD, NOTARY_KEY_CONTENT (a .p8 file), NOTARY_KEY_ID and NOTARY_ISSUER.
# Writes SIGNING_IDENTITY and NOTARY_… into GITHUB_ENV for release.py. Without CERTIFICATE it says so and changes nothing.
set -euo pipefail

if [ -z "${CERTIFICATE:-}" ]; then
    echo "::notice::No certificate is among the secrets: the app is signed ad hoc, and other Macs will ask to allow it by hand."
    exit 0
fi

umask 077
keychain=$RUNNER_TEMP/signing.keychain-db
keychain_password=$(openssl rand -base64 24)
echo "::add-mask::$keychain_password"
certificate=$RUNNER_TEMP/certificate.p12
trap 'rm -f "$certificate"' EXIT
base64 --decode <<<"$CERTIFICATE" >"$certificate"

security create-keychain -p "$keychain_password" "$keychain"
security set-keychain-settings -lut 7200 "$keychain"
security unlock-keychain -p "$keychain_password" "$keychain"
security import "$certificate" -k "$keychain" -P "$CERTIFICATE_PASSWORD" -f pkcs12 -T /usr/bin/codesign
# Without this codesign would ask for the keychain's password in a window that nobody sees.
security set-key-partition-list -S apple-tool:,apple: -k "$keychain_password" "$keychain" >/dev/null
security list-keychains -d user -s "$keychain" login.keychain-db

identity=$(security find-identity -v -p codesigning "$keychain" | sed -n 's/.*"\(Developer ID Application: .*\)"/\1/p' | head -n 1)
if [ -z "$identity" ]; then
    echo "::error::CERTIFICATE holds no certificate of the kind Developer ID Application."
    exit 1
fi
echo "SIGNING_IDENTITY=$identity" >>"$GITHUB_ENV"

if [ -z "${NOTARY_KEY_CONTENT:-}" ]; then
    echo "::notice::No notary key is among the secrets: the app is signed and not notarised, and other Macs will refuse it."
    exit 0
fi
printf '%s\n' "$NOTARY_KEY_CONTENT" >"$RUNNER_TEMP/notary.p8"
{
    echo "NOTARY_KEY=$RUNNER_TEMP/notary.p8"
    echo "NOTARY_KEY_ID=$NOTARY_KEY_ID"
    echo "NOTARY_ISSUER=$NOTARY_ISSUER"
} >>"$GITHUB_ENV"
