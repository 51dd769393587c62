"""Controls, layout and number formatting that every page uses."""
