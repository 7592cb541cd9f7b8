/* The kernels in AVX-512 with bfloat16 products. */
#include "kernels/avx512.h"
#include "kernels/functions.h"
#include "kernels/product.h"
#include "kernels/rows.h"
#include "kernels/attention.h"

const Kernels AVX512_BF16 = {INSTRUCTION_SET, product_share, norm_share, add_share, attention_share, place_share};
