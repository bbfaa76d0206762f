"""Builds the native passes of AdamW and of the neighbour sampler when a wheel or an editable install is made.

Without a C compiler, or where compiling fails, the package stays pure Python: its references give the same bits.
"""

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARIES = {
    "src/pipedejavu/optim/native.c": "src/pipedejavu/optim/_native.so",
    "src/pipedejavu/graph_data/sampler.c": "src/pipedejavu/graph_data/_sampler.so",
}
"""By C file, the library that Python loads by its path."""
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
"""Every operation is rounded once: nothing that lets a compiler contract or approximate."""


class NativeBuild(BuildHookInterface[Any]):
    """Compiles each C file to a library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compiles, and marks the wheel as one of this platform."""
        for source, library in LIBRARIES.items():
            fault = _compile(Path(self.root) / source, Path(self.root) / library)
            if fault is not None:
                self.app.display_warning(f"{source} was not compiled, {fault}; the reference takes its place.")
                continue
            build_data["artifacts"].append(library)
        if not build_data["artifacts"]:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # the library knows nothing of Python


def _compile(source: Path, library: Path) -> str | None:
    """Returns why there is no library, or None; one of an earlier build never stays behind."""
    library.unlink(missing_ok=True)
    compiler = _find_compiler()
    if compiler is None:
        return "for there is no C compiler (CC, cc, gcc, clang)"
    command = [*compiler, *FLAGS, "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"for {compiler[0]} cannot be run ({error.strerror})"
    if done.returncode != 0:
        library.unlink(missing_ok=True)
        said = next((line for line in done.stderr.splitlines() if "error" in line), "no error named")
        return f"for {shlex.join(compiler)} ended with {done.returncode} ({said})"
    return None


def _find_compiler() -> list[str] | None:
    """Returns the command of the compiler that CC names, or of the first that is there."""
    if asked := shlex.split(os.environ.get("CC", "")):
        return asked
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
