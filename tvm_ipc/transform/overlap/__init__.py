# SPDX-License-Identifier: Apache-2.0
"""Analyses and builders of passes that overlap communication with the matmul before or after it."""
