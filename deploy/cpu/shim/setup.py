"""Adds the .pth file to the wheel's root, for which setuptools has no setting."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "tandemkv_cpu_shim.pth"


class BuildWithPth(build_py):
    def run(self):
        super().run()
        shutil.copy(PTH, Path(self.build_lib) / PTH)

    def get_outputs(self, include_bytecode=True):
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / PTH)]


setup(cmdclass={"build_py": BuildWithPth})
