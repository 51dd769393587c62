"""The warm process that answers the window's questions, so that no page waits for an import or the network."""
