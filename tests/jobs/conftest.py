from tests.export.publish.conftest import hub as hub
from tests.export.publish.conftest import keychain as keychain
