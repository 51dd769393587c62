"""A keychain in memory, for tests."""

from keyring.backend import KeyringBackend


class Keychain(KeyringBackend):
    """Entries by (service, account)."""

    priority = 5  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.entries = dict[tuple[str, str], str]()

    def get_password(self, service: str, username: str) -> str | None:
        return self.entries.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.entries[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.entries[service, username]
