"""Models as files and as modules: load, quantise, adapt, find on this machine or the Hub, download, export, verify."""
