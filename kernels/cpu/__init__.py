"""What a CPU computes with packed weights: kernels in numba, whose threads share every step among them.

Of a small model's step on a CPU, calls and what threads wait at each of them would be most. So a whole step of replies is one call here.
"""
