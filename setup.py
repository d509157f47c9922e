"""Adds one step to the package build: the modules of the contracts, which are never committed.

Everything else about the package stands in pyproject.toml.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))

from protos.build import ROOT, build


class BuildWithStubs(build_py):
    """build_py after the stubs are built."""

    def run(self) -> None:
        """Builds the stubs before the packages are copied, so that both kinds of install have them."""
        build(ROOT)
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
