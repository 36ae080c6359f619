# SPDX-License-Identifier: Apache-2.0
"""Communication that goes on beside the matmul that needs it, or that makes what is sent."""
