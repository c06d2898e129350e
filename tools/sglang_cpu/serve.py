"""Stock SGLang on a CPU: the unmodified wheel, with stand-ins for three packages that exist for GPUs only.

    python serve.py --model-path DIR --device cpu --attention-backend torch_native ...   (SGLang's own arguments)

Runs in SGLang's own virtual environment (`make sglang`), so it imports nothing of this project. Kernels that a CPU does not
have raise when they are called; with float32, torch's attention and no grammar backend none is.

- triton: SGLang brings stubs of it for Apple silicon; they are installed as if this were such a machine.
- torchvision: its compiled part belongs to a GPU build of torch; only the schemas of two operators are declared.
- sgl_kernel: its CPU build is not published; an empty package stands in.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import types
from collections.abc import Callable
from pathlib import Path

OPERATORS = ("nms", "qnms")
declared = []  # libraries of operators live as long as they are referred to


def stub_triton() -> None:
    import torch

    if importlib.util.find_spec("triton") is not None:
        return
    path = Path(torch.__file__).parents[1] / "sglang" / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec, path
    assert spec.loader, path
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    stubs._patch_non_blocking = lambda: None
    real = sys.platform, platform.machine, torch.backends.mps.is_available
    try:
        sys.platform, platform.machine, torch.backends.mps.is_available = "darwin", lambda: "arm64", lambda: True
        stubs.install_platform_stubs()
    finally:
        sys.platform, platform.machine, torch.backends.mps.is_available = real


def declare_torchvision() -> None:
    import torch

    if torch.version.cuda:  # then torchvision's own compiled part belongs to it
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    declared.append(library)


class Kernels(types.ModuleType):
    """Has every name, and nothing behind it."""

    __path__ = ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} was called; there is no such kernel on a CPU")

        return missing


def stub_kernels() -> None:
    if importlib.util.find_spec("sgl_kernel") is None:
        for name in ("sgl_kernel", "sgl_kernel.mamba"):
            sys.modules[name] = Kernels(name)


os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of a small model wait for each other: on a busy machine, 40 times slower
stub_triton()  # at import: SGLang starts further processes, which import this file again
declare_torchvision()
stub_kernels()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(sys.argv[1:])
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
