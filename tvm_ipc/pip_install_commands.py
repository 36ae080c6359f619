# SPDX-License-Identifier: Apache-2.0
"""Provide the name of the distribution, and the commands that install it, for messages."""

from __future__ import annotations

from typing import Final

DISTRIBUTION: Final = "tvm-ipc"
#: The package is not on PyPI: `pip` installs it in the folder of a checkout.
_PACKAGE: Final = "."
_PLACE: Final = f"in a checkout of {DISTRIBUTION}"
INSTALL: Final = f"`pip install {_PACKAGE}` {_PLACE}"
REINSTALL: Final = f"`pip install --force-reinstall --no-deps {_PACKAGE}` {_PLACE}"


def install_extra(extra: str) -> str:
    """Return the command that installs the package with an extra, and where it is run.

    Examples
    --------
    >>> from tvm_ipc.pip_install_commands import install_extra
    >>> print(install_extra("mpi"))
    pip install '.[mpi]' in a checkout of tvm-ipc
    """
    return f"pip install '{_PACKAGE}[{extra}]' {_PLACE}"
