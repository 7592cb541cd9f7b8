/* The kernels in AVX2 with FMA. */
#include "kernels/avx2.h"
#include "kernels/functions.h"
#include "kernels/product.h"
#include "kernels/rows.h"
#include "kernels/attention.h"

const Kernels AVX2 = {INSTRUCTION_SET, product_share, norm_share, add_share, attention_share, place_share};
