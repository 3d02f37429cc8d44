"""Package of the CPU shim; see tandemkv_cpu_shim.py."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """Put the .pth file beside the modules, so that every interpreter loads the shim."""

    def run(self):
        super().run()
        shutil.copy("tandemkv_cpu_shim.pth", Path(self.build_lib) / "tandemkv_cpu_shim.pth")

    def get_outputs(self, *args, **kwargs):
        outputs = super().get_outputs(*args, **kwargs)
        return [*outputs, str(Path(self.build_lib) / "tandemkv_cpu_shim.pth")]


setup(
    name="tandemkv-cpu-shim",
    version="0.1.0",
    py_modules=["tandemkv_cpu_shim"],
    packages=["sgl_kernel"],
    cmdclass={"build_py": BuildWithPth},
)
