"""What the process in which a chat template is tried may take, known to it and to its parent."""

VERB = "try-chat-template"
"""The verb of that process in a bundled app."""
TIME_S = 1.0
"""Seconds of computing."""
MEMORY = 2**30
"""Bytes of memory. macOS has no limit that holds for all of it; there the limit on time is the only one."""
LONGEST = 10_000_000
"""Characters of a rendered chat of a few words."""
