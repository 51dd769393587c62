"""What the process imports from which those of the trials are forked."""

from backend.engine import cpu_setup

cpu_setup.load_openblas()  # before mlx is imported

from tests.support.architectures import trials  # noqa: E402, F401
