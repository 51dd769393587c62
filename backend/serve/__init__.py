"""A warm process that answers the window's questions as JSON lines, so that no page waits for an import or the network."""
