/* What is computed of single numbers, 16 at a time. */
#pragma once

/* 2^x to some 8e-5 of itself, bfloat16 having 4e-3; 0 and infinity of what is infinite. */
INLINE Floats exp2_of(Floats x) {
    const Floats bounded = bounded_power(x), whole = nearest_whole(bounded), rest = sub(bounded, whole);
    /* Of the third degree, the largest error relative to 2^x over [-1/2, 1/2] the smallest. */
    Floats sum = all_of(5.517165e-2f);
    sum = mul_add(sum, rest, all_of(2.426111e-1f));
    sum = mul_add(sum, rest, all_of(6.932610e-1f));
    sum = mul_add(sum, rest, all_of(9.999281e-1f));
    return times_power(sum, whole);
}

/* 1 / (1 + e^-x) to some 2e-4 of itself; 0 from -1e4 down. */
INLINE Floats sigmoid_of(Floats x) {
    const Floats power = exp2_of(mul(larger(x, all_of(-1e4f)), all_of(-1.44269504f)));
    return inverse_of(add(all_of(1.0f), power));
}

/* silu is x * sigmoid(x); the tanh form of gelu is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)). */
INLINE Floats activated(Floats x, int gelu) {
    if (!gelu) return mul(x, sigmoid_of(x));
    const Floats cubic = mul_add(mul(x, x), all_of(0.044715f), all_of(1.0f));
    return mul(x, sigmoid_of(mul(mul(x, cubic), all_of(1.59576912f))));
}
