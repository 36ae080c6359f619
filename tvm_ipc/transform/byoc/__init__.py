# SPDX-License-Identifier: Apache-2.0
"""What the passes for external compilers share: names of functions, and what an extern declares."""
