"""How a run's ranks are started, watched and ended, on this machine and on others."""
