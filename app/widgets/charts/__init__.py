"""Charts over steps: plots, their grid, and charts as files."""
