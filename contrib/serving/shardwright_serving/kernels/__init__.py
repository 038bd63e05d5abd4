"""Compute kernels that look quantized tables up and do not train them.

All of them sum in one order and round alike: a row's value is ``value * scale + bias``, of which only the sum is
rounded, and a bag adds its rows in their order. FBGEMM's kernel alone rounds otherwise.
"""
