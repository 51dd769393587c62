"""Parts that only one page uses and that know the session, so that they are no widgets."""
