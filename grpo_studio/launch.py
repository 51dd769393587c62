"""The two programs that installing the package puts on the path. Each imports its half only when it is called."""


def window() -> int:
    """`grpo-studio`: open the window."""
    from app.__main__ import main

    return main()


def backend() -> int:
    """`grpo-studio-backend`: run a verb of the trainer."""
    from backend.__main__ import main

    return main() or 0
