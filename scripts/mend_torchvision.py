"""Let torchvision be imported beside a torch without CUDA, in the environments of `make peers`.

PyPI's torchvision is built for CUDA. Beside the CPU build of torch its library of operators does not load, and its
import fails at the first of them that it wants to describe. The libraries that import it there use none: it is enough
that they are declared. Where torchvision works nothing is changed.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

FINDER = '''import importlib.abc
import sys


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Declares the operators just before torchvision is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            sys._torchvision_operators = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                sys._torchvision_operators.define(
                    operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, DeclareOperators())
'''


def main() -> None:
    """Try the import, and mend it where it fails."""
    if _works():
        return
    packages = Path(sysconfig.get_path("purelib"))
    (packages / "torchvision_operators.py").write_text(FINDER)
    (packages / "torchvision_operators.pth").write_text("import torchvision_operators\n")
    if not _works():
        sys.exit("torchvision cannot be imported here, and declaring its operators does not help")
    print("torchvision is built for another torch; it was mended so that it can be imported (without its operators)")


def _works() -> bool:
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    main()
