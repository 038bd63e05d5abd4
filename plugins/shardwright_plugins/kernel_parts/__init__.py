"""Parts of the built-in compute kernels that kernels of other distributions are built from.

One module for each library, imported where a kernel builds its lookup: `by_torch`, `by_numba`, `by_fbgemm` and
`by_triton`; `machine`, which imports none of them, says what runs here.
"""
