# SPDX-License-Identifier: Apache-2.0
"""Selective recomputation: the target LLM runs again for a chosen few rows of the prefix.

The methods of this family differ in which rows they choose for which layer, and in what those may attend to; everything
else is here. `prefix` puts the chunks side by side, `kernel` moves rows up the layers, `probe` scores rows by the
question's attention, `method` is what the repairers share.
"""
