"""With this folder on PYTHONPATH, Python installs `tests.support.failing_gpu` as the trainer is imported."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder


class BeforeTheTrainer(MetaPathFinder):
    """Finds nothing: it only learns of the import. Earlier mlx must not be imported, because a BLAS comes first."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "backend.trainer.trainer":
            sys.meta_path.remove(self)
            from tests.support.failing_gpu import install_from_environment

            install_from_environment()


sys.meta_path.insert(0, BeforeTheTrainer())
