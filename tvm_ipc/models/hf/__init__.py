# SPDX-License-Identifier: Apache-2.0
"""Compile language models that transformers saved, and generate tokens with them."""
