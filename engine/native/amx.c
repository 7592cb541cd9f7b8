/* The kernels in AMX, with AVX-512 for all that is no product. */
#include "kernels/amx.h"
#include "kernels/functions.h"
#include "kernels/product.h"
#include "kernels/rows.h"
#include "kernels/attention.h"

const Kernels AMX_BF16 = {INSTRUCTION_SET, product_share, norm_share, add_share, attention_share, place_share};
