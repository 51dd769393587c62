"""The dialogs of the Help menu: About with its licences, pages of text, the report of a problem."""
