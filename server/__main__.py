# SPDX-License-Identifier: Apache-2.0
"""Entry point of the ``tandemkv`` command and of ``python -m tandemkv.server``."""

from __future__ import annotations

from tandemkv.server.cli.commands import app


def main() -> None:
    """Run the command line."""
    app(prog_name="tandemkv")


if __name__ == "__main__":
    main()
